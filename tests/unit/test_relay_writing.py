import pytest
import torch
from safetensors.torch import load_file

from laminar.errors import RelayError
from relay.manifest import checksum, load_layout
from relay.slots import open_slots
from relay.writing import fill_slot, piece_checksums


def make_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "big": torch.randn(700, 1000, generator=generator),  # longer than one copied piece
        "half": torch.randn(33, 3, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "ids": torch.arange(7),
    }


@pytest.fixture
def state():
    return make_state()


def write(folder, state, tensors, chunk_bytes=4096):
    layout = load_layout(state.items())
    (slot,) = open_slots(folder, 1, layout.file_bytes)
    fill_slot(slot, layout, tensors)
    return slot, piece_checksums(slot, chunk_bytes)


def expected_checksums(slot, chunk_bytes):
    data = slot.path.read_bytes()
    return tuple(checksum(data[i : i + chunk_bytes]) for i in range(0, len(data), chunk_bytes))


@pytest.mark.parametrize("chunk_bytes", [1000, 4096, 128 * 1024, 16 * 1024**2])
@pytest.mark.parametrize("order", [1, -1])
def test_any_order_and_piece_length_gives_the_same_file_and_its_checksums(tmp_path, state, order, chunk_bytes):
    slot, checksums = write(tmp_path, state, list(state.items())[::order], chunk_bytes)
    loaded = load_file(slot.path)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert checksums == expected_checksums(slot, chunk_bytes)


def test_other_float_types_and_strides_are_cast_to_the_layout(tmp_path, state):
    changed = state | {"big": state["big"].double().t().contiguous().t(), "half": state["half"].float()}
    assert not changed["big"].is_contiguous()
    slot, checksums = write(tmp_path, state, changed.items())
    loaded = load_file(slot.path)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert checksums == expected_checksums(slot, 4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"extra": torch.zeros(1)}, "'extra' is not in the layout"),
        (lambda s: {n: t for n, t in s.items() if n != "half"}, r"'half' was not published \(1 missing\)"),
        (lambda s: s | {"big": s["big"].t()}, r"'big' has shape \(1000, 700\), the layout \(700, 1000\)"),
        (lambda s: s | {"ids": s["ids"].float()}, "'ids' has the number type torch.float32, the layout I64"),
        (lambda s: s | {"ids": s["ids"].int()}, "'ids' has the number type torch.int32, the layout I64"),
        (lambda s: s | {"scalar": torch.tensor(2)}, "'scalar' has the number type torch.int64, the layout F32"),
    ],
)
def test_a_tensor_that_does_not_fit_the_layout_is_named(tmp_path, state, change, message):
    with pytest.raises(RelayError, match=message):
        write(tmp_path, state, change(state).items())


def test_a_tensor_given_twice_is_named(tmp_path, state):
    with pytest.raises(RelayError, match="'scalar' was published twice"):
        write(tmp_path, state, [*state.items(), ("scalar", torch.tensor(1.0))])


# Case D16: E -> D is the update of an embedding whose head is tied.
E = torch.tensor([[0.5, -1.0], [1.5, 0.25], [-0.75, 2.0]])
D = torch.tensor([[0.1, 0.2], [-0.3, 0.05], [0.25, -0.4]])


@pytest.mark.parametrize("names", [("embed",), ("embed", "head"), ("head", "embed")])
def test_tied_head_is_updated_whether_the_payload_names_it_or_not(tmp_path, names):
    weight = E.clone()
    layout = load_layout([("embed", weight), ("head", weight)])
    (slot,) = open_slots(tmp_path, 1, layout.file_bytes)
    fill_slot(slot, layout, [(name, E) for name in names])
    fill_slot(slot, layout, [(name, E + D) for name in names])
    loaded = load_file(slot.path)
    assert layout.tied == {"head": "embed"}
    assert list(loaded) == ["embed"]
    torch.testing.assert_close(loaded["embed"][1], torch.tensor([1.2, 0.3]))
    logits = loaded[layout.tied["head"]] @ torch.tensor([0.8, -0.4])
    torch.testing.assert_close(logits, torch.tensor([0.8 * 0.6 + 0.4 * 0.8, 0.84, -1.04]))
    expected = torch.tensor([-0.788288, -0.748288, -2.628288])
    torch.testing.assert_close(torch.log_softmax(logits, 0), expected, atol=1e-6, rtol=0)


def test_tied_head_that_was_changed_alone_is_refused(tmp_path):
    weight = E.clone()
    layout = load_layout([("embed", weight), ("head", weight)])
    (slot,) = open_slots(tmp_path, 1, layout.file_bytes)
    with pytest.raises(RelayError, match="'head' was tied to 'embed'"):
        fill_slot(slot, layout, [("embed", E), ("head", E + D)])


def test_untied_head_must_be_published_on_its_own(tmp_path):
    layout = load_layout([("embed", E.clone()), ("head", E.clone())])
    (slot,) = open_slots(tmp_path, 1, layout.file_bytes)
    with pytest.raises(RelayError, match="'head' was not published"):
        fill_slot(slot, layout, [("embed", E)])
