import json

import pytest
import torch
import xxhash
from safetensors import safe_open

from laminar.errors import RelayError
from laminar.types import WeightVersion
from relay.manifest import Manifest, TensorSpec, broken_chunks, checksum, load_layout, num_chunks, plan_layout


def test_header_is_read_by_safetensors_and_places_every_tensor_where_the_layout_says(tmp_path):
    state = {
        "a": torch.tensor([1, 2], dtype=torch.int8),
        "b": torch.tensor([[0.5, -1.0]]),
        "c": torch.ones(3, dtype=torch.bfloat16),
    }
    layout = load_layout(state.items())
    file = bytearray(layout.header) + bytearray(layout.file_bytes - len(layout.header))
    for name, spec in layout.tensors.items():
        file[spec.offset : spec.offset + spec.nbytes] = state[name].view(torch.uint8).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(file)
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(state)
        for name, tensor in state.items():
            assert torch.equal(opened.get_tensor(name), tensor)
            assert opened.get_tensor(name).dtype == tensor.dtype


def test_wider_numbers_come_first_so_that_every_tensor_is_aligned_to_its_numbers():
    layout = plan_layout([("a", "I8", (3,)), ("b", "F64", (2,)), ("c", "BF16", (5,)), ("d", "F32", ())], {})
    start = len(layout.header)
    assert start % 64 == 0
    # 2 float64 = 16 bytes, then one float32, 5 bfloat16, 3 int8
    assert {name: spec.offset - start for name, spec in layout.tensors.items()} == {"b": 0, "d": 16, "c": 20, "a": 30}
    assert layout.file_bytes == start + 33


def test_tensors_of_one_type_keep_the_order_of_the_model():
    layout = plan_layout([(name, "F32", (1,)) for name in ("z", "a", "m")], {})
    assert list(layout.tensors) == ["z", "a", "m"]


def test_weights_that_share_memory_are_stored_once_under_the_first_name():
    embedding = torch.nn.Parameter(torch.zeros(3, 2))
    layout = load_layout([("embed.weight", embedding), ("norm", torch.zeros(2)), ("head.weight", embedding.data)])
    assert list(layout.tensors) == ["embed.weight", "norm"]
    assert layout.tied == {"head.weight": "embed.weight"}


def test_different_views_of_one_flat_buffer_are_not_tied():
    flat = torch.zeros(12)
    layout = load_layout(
        [("a", flat[:6]), ("b", flat[6:]), ("c", flat[:6].view(2, 3)), ("d", torch.empty(0)), ("e", torch.empty(0))]
    )
    assert layout.tied == {}


def test_temporaries_that_reuse_an_address_are_not_taken_for_tied():
    layout = load_layout((f"t{i}", torch.full((1024,), float(i))) for i in range(20))
    assert len(layout.tensors) == 20
    assert layout.tied == {}


@pytest.mark.parametrize(
    ("stored", "tied", "named"),
    [
        ([("a", "F32", (1,)), ("a", "F32", (1,))], {}, "'a' was published twice"),
        ([], {}, "no tensor"),
        ([("a", "F32", (1,))], {"b": "c"}, "'b'"),
        ([("a", "F32", (1,))], {"a": "a"}, "'a'"),
    ],
)
def test_impossible_layouts_are_refused_by_name(stored, tied, named):
    with pytest.raises(RelayError, match=named):
        plan_layout(stored, tied)


def test_number_types_that_weight_files_lack_are_refused_by_name():
    with pytest.raises(RelayError, match=r"'phase'.*complex64"):
        load_layout([("phase", torch.zeros(2, dtype=torch.complex64))])


def make_manifest(data: bytes, chunk_bytes: int) -> Manifest:
    pieces = [data[i : i + chunk_bytes] for i in range(0, len(data), chunk_bytes)]
    return Manifest(
        version=WeightVersion(1, 7),
        run_id="r",
        tensors={"w": TensorSpec("F32", (2, 1), 64, 8)},
        tied={"h": "w"},
        file_bytes=len(data),
        chunk_bytes=chunk_bytes,
        checksums=tuple(f"{xxhash.xxh3_64_intdigest(piece):016x}" for piece in pieces),
    )


def test_manifest_survives_json():
    manifest = make_manifest(b"x" * 72, 32)
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_manifest_of_another_format_is_refused():
    fields = json.loads(make_manifest(b"x" * 72, 32).to_json()) | {"format": 99}
    with pytest.raises(RelayError, match="format 99"):
        Manifest.from_json(json.dumps(fields))


def test_manifest_whose_checksums_do_not_cover_the_file_is_refused():
    with pytest.raises(RelayError, match="do not cover 72"):
        Manifest(WeightVersion(0, 0), "r", {}, {}, 72, 32, ("0" * 16,))


def test_broken_chunks_names_exactly_the_pieces_that_changed():
    data = bytearray(range(100))
    manifest = make_manifest(bytes(data), 32)
    assert broken_chunks(memoryview(data), manifest) == []
    data[40] ^= 1
    data[99] ^= 1
    assert broken_chunks(memoryview(data), manifest) == [1, 3]
    assert broken_chunks(memoryview(data)[:99], manifest) == [0, 1, 2, 3]


def test_checksum_is_xxh3_64():
    assert checksum(b"") == "2d06800538d394c2"  # the published value for empty input


@pytest.mark.parametrize(("file_bytes", "expected"), [(1, 1), (16, 1), (17, 2), (32, 2)])
def test_last_piece_may_be_shorter(file_bytes, expected):
    assert num_chunks(file_bytes, 16) == expected
