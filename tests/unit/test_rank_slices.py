"""What a tensor-parallel rank takes of each stored tensor, and what it says of it (cases D15)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from laminar.errors import EngineError
from laminar.types import WeightVersion
from relay.publisher import Publisher
from relay.store import WEIGHTS_NAME, VersionStore
from rollout.engines.pinned_load import PinnedLoad
from rollout.engines.ranks.laminar_weights import Heads, Slots, fill, fingerprint, plan_slice, write_receipt

HEADS = Heads(num_query=4, num_key_value=2, dimension=2)
LAYER = "model.layers.0"
TWO, THREE = WeightVersion(0, 2), WeightVersion(0, 3)
A, B = f"{LAYER}.mlp.down_proj.weight", "model.norm.weight"


def stored_model():
    """Whole tensors, hidden size 8, all numbers different; 100 tokens, of which SGLang makes 128."""
    rng = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        f"{LAYER}.self_attn.q_proj.weight": (8, 8), f"{LAYER}.self_attn.q_proj.bias": (8,),
        f"{LAYER}.self_attn.k_proj.weight": (4, 8), f"{LAYER}.self_attn.k_proj.bias": (4,),
        f"{LAYER}.self_attn.v_proj.weight": (4, 8), f"{LAYER}.self_attn.v_proj.bias": (4,),
        f"{LAYER}.self_attn.o_proj.weight": (8, 8), f"{LAYER}.mlp.gate_proj.weight": (12, 8),
        f"{LAYER}.mlp.up_proj.weight": (12, 8), f"{LAYER}.mlp.down_proj.weight": (8, 12),
        f"{LAYER}.input_layernorm.weight": (8,), "model.norm.weight": (8,), "lm_head.weight": (100, 8),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def expected_rank(stored, rank, size, kv_rows):
    """The rank's parameters by numpy: heads of two rows each, shares of equal length."""
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    q = slice(rank * 8 // size, (rank + 1) * 8 // size)
    half = slice(rank * 12 // size, (rank + 1) * 12 // size)
    parameters = {
        f"{attention}.qkv_proj.{kind}": np.concatenate(
            [stored[f"{attention}.q_proj.{kind}"][q]] + [stored[f"{attention}.{x}_proj.{kind}"][kv_rows] for x in "kv"]
        )
        for kind in ("weight", "bias")
    }
    parameters[f"{attention}.o_proj.weight"] = stored[f"{attention}.o_proj.weight"][:, q]
    gate, up = stored[f"{mlp}.gate_proj.weight"], stored[f"{mlp}.up_proj.weight"]
    parameters[f"{mlp}.gate_up_proj.weight"] = np.concatenate([gate[half], up[half]])
    parameters[f"{mlp}.down_proj.weight"] = stored[f"{mlp}.down_proj.weight"][:, half]
    for name in (f"{LAYER}.input_layernorm.weight", "model.norm.weight"):
        parameters[name] = stored[name]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = np.concatenate([stored[name], np.full((28, 8), 7.0, np.float32)])  # what lay in the padding stays
        parameters[name] = np.split(padded, size)[rank]
    return parameters


@pytest.mark.parametrize(
    ("size", "rank", "kv_rows"),
    [
        (1, 0, slice(0, 4)),
        (2, 0, slice(0, 2)),
        (2, 1, slice(2, 4)),
        (4, 1, slice(0, 2)),
        (4, 2, slice(2, 4)),
        (4, 3, slice(2, 4)),
    ],
)
def test_each_rank_holds_its_part_of_fused_row_parallel_and_padded_tensors(size, rank, kv_rows):
    stored = stored_model()
    expected = expected_rank(stored, rank, size, kv_rows)
    parameters = {name: torch.full(value.shape, 7.0) for name, value in expected.items()}
    fill(parameters, {name: torch.from_numpy(value) for name, value in stored.items()}, HEADS, rank, size)
    for name, value in expected.items():
        assert np.array_equal(parameters[name].numpy(), value), name


@pytest.mark.parametrize(
    ("name", "shape", "size", "message"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", (8, 8), 3, "cannot be cut into 3"),
        (f"{LAYER}.mlp.gate_proj.weight", (12, 8), 5, "cannot be cut into 5"),
        ("model.visual.patch.weight", (8, 8), 1, "weight_load = 'disk'"),
    ],
)
def test_what_cannot_be_cut_or_is_not_known_is_named(name, shape, size, message):
    with pytest.raises(ValueError, match=message):
        plan_slice(name, shape, HEADS, 0, size)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_names_and_shapes_are_checked_before_anything_is_copied(change):
    parameters = {A: torch.zeros(1, 2), B: torch.zeros(2)}
    stored = {A: torch.tensor([[1.0, 2, 3, 4]]), B: torch.tensor([10.0, 20])}
    if change == "missing":
        del stored[B]
    elif change == "unknown":
        stored[f"{LAYER}.input_layernorm.weight"] = torch.zeros(2)
    else:
        stored[B] = torch.zeros(3)
    with pytest.raises(ValueError, match="norm"):
        fill(parameters, stored, HEADS, 0, 2)
    assert not parameters[A].any()


def test_a_fingerprint_changes_with_a_value_and_with_its_place():
    numbers = torch.arange(12.0).view(3, 4)
    changed, moved = numbers.clone(), numbers.clone()
    changed[2, 1] += 1e-6 * 9
    moved[0, 0], moved[2, 3] = numbers[2, 3], numbers[0, 0]
    assert len({fingerprint(numbers), fingerprint(changed), fingerprint(moved)}) == 3
    assert fingerprint(numbers.T.contiguous().T) == fingerprint(numbers)


class Ranks:
    """Two ranks that hold version 1, all zeros, and the sender's half."""

    def __init__(self, folder):
        self.load = PinnedLoad(folder / "request.json", 2)
        self.parameters = [{A: torch.zeros(1, 2), B: torch.zeros(2)} for _ in range(2)]
        self.slots = Slots()

    def fill(self, rank):
        wanted = json.loads(self.load.request.read_text())

        def fill_rank():
            stored = self.slots.tensors(Path(wanted["folder"]) / WEIGHTS_NAME, pinned=False)
            return fill(self.parameters[rank], stored, HEADS, rank, 2)

        write_receipt(self.load.request, wanted["version"], rank, fill_rank)

    @property
    def held(self):
        return [[*one[A][0].tolist(), *one[B].tolist()] for one in self.parameters]


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    store = VersionStore(tmp_path, "run", "node", mapping_readers=1)
    publisher = Publisher(store, tmp_path)
    publisher.publish(TWO, [(B, torch.tensor([10.0, 20])), (A, torch.tensor([[1.0, 2, 3, 4]]))])
    yield store, publisher, Ranks(tmp_path)
    publisher.close()


def test_two_ranks_hold_their_halves_and_say_so(machine):
    """Cases D15: sums 33 and 37."""
    store, _, ranks = machine
    with store.lease(TWO) as folder:
        ranks.load.ask(folder, TWO)
        ranks.fill(0)
        ranks.fill(1)
    ranks.load.check(TWO)
    assert ranks.held == [[1, 2, 10, 20], [3, 4, 10, 20]]
    assert [report.version for report in ranks.load.reports()] == ["0.2", "0.2"]
    assert [sum(held) for held in ranks.held] == [33, 37]


def test_a_rank_that_is_late_reads_the_version_it_was_asked_for_though_a_newer_one_was_published(machine):
    """Cases D15 (a)."""
    store, publisher, ranks = machine
    with store.lease(TWO) as folder:
        ranks.load.ask(folder, TWO)
        ranks.fill(0)
        publisher.publish(THREE, [(A, torch.zeros(1, 4)), (B, torch.zeros(2))])
        ranks.fill(1)
    ranks.load.check(TWO)
    assert ranks.held == [[1, 2, 10, 20], [3, 4, 10, 20]]


def test_a_rank_that_fails_is_named_and_no_success_is_told(machine):
    """Cases D15 (b)."""
    store, _, ranks = machine
    ranks.parameters[1][B] = torch.zeros(3)
    with store.lease(TWO) as folder:
        ranks.load.ask(folder, TWO)
        ranks.fill(0)
        ranks.fill(1)
    with pytest.raises(EngineError, match=r"rank 1 of 2 did not load 0\.2: ValueError: model\.norm\.weight"):
        ranks.load.check(TWO)


def test_a_rank_that_answers_late_for_an_earlier_version_is_named_with_it(tmp_path):
    load = PinnedLoad(tmp_path / "request.json", 2)
    load.ask(tmp_path, THREE)
    write_receipt(load.request, str(THREE), 0, lambda: "x")
    write_receipt(load.request, str(TWO), 1, lambda: "y")
    with pytest.raises(EngineError, match=r"rank 1 of 2 did not load 0\.3: it says it holds 0\.2"):
        load.check(THREE)


@pytest.mark.parametrize("error", [IndexError("tuple index out of range"), TypeError("no"), MemoryError()])
def test_whatever_fails_a_rank_is_said_in_its_receipt(tmp_path, error):
    """A rank that raised would leave the others in a barrier, and the sender without the cause."""

    def fail():
        raise error

    load = PinnedLoad(tmp_path / "request.json", 1)
    load.ask(tmp_path, TWO)
    write_receipt(load.request, str(TWO), 0, fail)
    with pytest.raises(EngineError, match=rf"rank 0 of 1 did not load 0\.2: {type(error).__name__}: {error}"):
        load.check(TWO)


def test_a_rank_that_never_answered_is_named(machine):
    """Cases D15 (d): the receipt of an earlier version does not count."""
    store, publisher, ranks = machine
    with store.lease(TWO) as folder:
        ranks.load.ask(folder, TWO)
        ranks.fill(0)
        ranks.fill(1)
    publisher.publish(THREE, [(A, torch.zeros(1, 4)), (B, torch.zeros(2))])
    with store.lease(THREE) as folder:
        ranks.load.ask(folder, THREE)
        ranks.fill(0)
    with pytest.raises(EngineError, match="rank 1 of 2 did not say what it loaded"):
        ranks.load.check(THREE)
