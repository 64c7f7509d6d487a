"""ZeRO 0 to 3 on one and two ranks: the same training, gathering without a standstill, state that moves between all of them.

The file is its own rank program: the tests of two ranks start it twice.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from laminar.errors import RelayError
from laminar.types import WeightVersion
from relay.publisher import Publisher
from relay.store import VersionStore
from trainer import checkpoint
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.engine import TrainerEngine
from trainer.gathering import buckets
from trainer.publishing import WeightPublisher
from trainer.session import TrainingSession
from trainer.step import train_step

spec = importlib.util.spec_from_file_location("step_oracle", Path(__file__).with_name("step_oracle.py"))
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

STEPS = 5
SPLITS = [8192, 40, 20]
"""Tokens in a micro-batch: everything at once, some rows, one or two rows."""
MOVES = [
    # saved by (ranks, stage), loaded by (ranks, stage)
    ((1, 0), (2, 3)),
    ((1, 3), (2, 1)),
    ((2, 3), (1, 0)),
    ((2, 3), (1, 3)),
    ((2, 1), (1, 3)),
    ((2, 2), (2, 3)),
]


def config_of(model, stage, dtype="auto", **trainer):
    settings = {"deepspeed": {"zero_stage": stage, "max_whole_parameter": 40}, "max_tokens_per_micro_batch": 40}
    config = oracle.make_config(model, **settings | trainer)
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return oracle.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_path):
    return oracle.plain_loop(model_path, STEPS)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_five_steps_are_those_of_a_plain_loop(stage, split, model_path, ranks, reference):
    """Losses to 1e-6, gradient norms to 1e-5 of themselves, weights to 1e-4 of themselves + 2e-6, all in float32."""
    engine, reports = oracle.train(config_of(model_path, stage, max_tokens_per_micro_batch=split), ranks, STEPS)
    oracle.assert_same_training(oracle.weights(engine), [report.metrics for report in reports], reference)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_kept_on_the_host_trains_alike(stage, model_path, ranks, reference):
    settings = {"zero_stage": stage, "max_whole_parameter": 40, "offload_optimizer": True}
    engine, reports = oracle.train(oracle.make_config(model_path, deepspeed=settings), ranks, STEPS)
    oracle.assert_same_training(oracle.weights(engine), [report.metrics for report in reports], reference)


def test_buckets_hold_what_fits_and_a_larger_parameter_stands_alone():
    named = [(str(size), torch.empty(size)) for size in (2, 3, 10, 1, 1)]
    assert [[name for name, _ in bucket] for bucket in buckets(named, max_bytes=20)] == [["2", "3"], ["10"], ["1", "1"]]


@pytest.fixture(scope="module")
def two_ranks_did(model_path, tmp_path_factory, ranks, run_two_ranks):
    """Everything below that two ranks do, done once, after one rank alone has saved; the folder of what they left."""
    folder = tmp_path_factory.mktemp("two")
    for stage in (0, 3):
        engine, _ = oracle.train(config_of(model_path, stage), ranks, 1)
        checkpoint.save(folder / f"1-{stage}", 1, engine, {}, keep=1)
    run_two_ranks(__file__, model_path, folder, 480)
    return folder


def test_two_ranks_at_every_stage_and_split_are_as_a_plain_loop(two_ranks_did, reference):
    for rank in range(2):
        told = json.loads((two_ranks_did / f"rank{rank}.json").read_text())
        assert set(told["reports"]) == {f"{stage}-{split}" for stage in range(4) for split in SPLITS}
        for case, reports in told["reports"].items():
            tensors = load_file(two_ranks_did / f"{case}-rank{rank}.safetensors")
            oracle.assert_same_training(tensors, reports, reference)


def test_what_two_ranks_publish_is_whole_and_no_outcome_of_it_makes_one_wait(two_ranks_did):
    """They published, were skipped, offered again, failed half-way, trained on and published: all in one go, to the end."""
    published = load_file(two_ranks_did / "published" / "model.safetensors")
    expected = load_file(two_ranks_did / "expected.safetensors")
    assert published.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in published.items())


def full_state(folder):
    """The optimizer state of a checkpoint, each parameter's pieces put together, whoever had them."""
    pieces = {}
    for file in sorted(folder.glob("optimizer_*")):
        for key, tensor in load_file(file).items():
            kind, _, rest = key.partition("/")
            start, _, name = rest.partition("/")
            pieces.setdefault((kind, name), {})[int(start or 0)] = tensor.reshape(-1)
    return {place: torch.cat([parts[start] for start in sorted(parts)]) for place, parts in pieces.items()}


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_a_checkpoint_is_resumed_bit_for_bit_on_other_ranks_and_stages(move, two_ranks_did, model_path, ranks, reference):
    (num_before, stage_before), (num_after, stage_after) = move
    saved = two_ranks_did / f"{num_before}-{stage_before}" / "step_000001"
    if num_after == 1:
        root = two_ranks_did / f"{move}"
        metrics = resume(config_of(model_path, stage_after), ranks, saved, root)
    else:
        root = two_ranks_did / f"{move}"
        metrics = json.loads((two_ranks_did / "rank0.json").read_text())["resumed"][str(move)]
    before, moved = full_state(saved), full_state(root / "step_000001")
    assert {kind for kind, _ in before} == {"exp_avg", "exp_avg_sq", "step"}
    assert before.keys() == moved.keys()
    assert all(torch.equal(tensor, moved[place]) for place, tensor in before.items())
    model, again = (load_file(path / "model" / "model.safetensors") for path in (saved, root / "step_000001"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.items())
    assert metrics["train/loss"] == pytest.approx(reference[1][1], abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(reference[2][1], rel=1e-5)


def test_under_bfloat16_the_float32_weights_move_bit_for_bit(two_ranks_did, model_path, ranks, tmp_path):
    saved = two_ranks_did / "2-bfloat16" / "step_000001"
    resume(config_of(model_path, 1, "bfloat16"), ranks, saved, tmp_path)
    before, moved = full_state(saved), full_state(tmp_path / "step_000001")
    assert {kind for kind, _ in before} == {"weights", "exp_avg", "exp_avg_sq", "step"}
    assert all(torch.equal(tensor, moved[place]) for place, tensor in before.items())


def one_step(engine, step):
    groups = {group[0].group_id: group for group in oracle.make_groups(step)}
    own = list(groups.values()) if engine.ranks.is_first else None
    return train_step(engine, PolicyGradient(GrpoOptions()), own, step, fetch=lambda ids: [groups[name] for name in ids])


def resume(config, ranks, saved, root):
    """Load, save what was loaded, train the second step: its metrics."""
    engine = TrainerEngine(config, ranks)
    checkpoint.load(saved, engine)
    checkpoint.save(root, 1, engine, {}, keep=1)
    return one_step(engine, 2).metrics


class Renamed:
    """Weights of which one comes under another name, as no publisher accepts them."""

    def __init__(self, session):
        self.session, self.state_shapes = session, session.state_shapes

    def state_tensors(self):
        for number, (name, tensor) in enumerate(self.session.state_tensors()):
            yield (name if number != 3 else "stranger"), tensor


def publish_in_every_way(session, model, folder):
    """Rank 0, the other follows: publish, be skipped while all slots are read, offer again, fail, train, publish."""
    (folder / "store").mkdir(exist_ok=True)
    store = VersionStore(folder / "store", "run", "node")
    publisher = Publisher(store, model)
    weights = WeightPublisher(publisher, session)
    assert not weights.publish(WeightVersion(0, 1)).skipped
    with store.lease(WeightVersion(0, 1)):
        assert not weights.publish(WeightVersion(0, 2)).skipped
        with store.lease(WeightVersion(0, 2)):
            assert weights.publish(WeightVersion(0, 3)).skipped
    weights.offer_again()
    assert store.newest() == WeightVersion(0, 3)
    with pytest.raises(RelayError, match="stranger"):
        WeightPublisher(publisher, Renamed(session)).publish(WeightVersion(0, 4))
    assert session.train(oracle.make_groups(9), 1).skipped_reason is None
    assert not weights.publish(WeightVersion(0, 4)).skipped
    shutil.copytree(store.folder_of(WeightVersion(0, 4)), folder / "published")
    with contextlib.closing(session.state_tensors()) as tensors:
        save_file({name: tensor.clone() for name, tensor in tensors}, folder / "expected.safetensors")


def rank_program(model, folder, port, rank):
    """What each of the two ranks does; see the tests above."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    groups = {group[0].group_id: group for group in oracle.make_groups(9)}
    session = TrainingSession(
        config_of(model, 3, num_ranks=2), folder / "none", rank, store, lambda ids: [groups[name] for name in ids]
    )
    ranks, result = session.engine.ranks, {"reports": {}, "resumed": {}}
    for stage in range(4):
        for split in SPLITS:
            engine, reports = oracle.train(config_of(model, stage, max_tokens_per_micro_batch=split), ranks, STEPS)
            result["reports"][f"{stage}-{split}"] = [report.metrics for report in reports]
            save_file(oracle.weights(engine), folder / f"{stage}-{split}-rank{rank}.safetensors")
    for name, config in {
        **{f"2-{stage}": config_of(model, stage) for stage in (1, 2, 3)},
        "2-bfloat16": config_of(model, 3, "bfloat16"),
    }.items():
        engine, _ = oracle.train(config, ranks, 1)
        checkpoint.save(folder / name, 1, engine, {}, keep=1)
    for move in MOVES:
        (num_before, stage_before), (num_after, stage_after) = move
        if num_after == 2:
            saved = folder / f"{num_before}-{stage_before}" / "step_000001"
            result["resumed"][str(move)] = resume(config_of(model, stage_after), ranks, saved, folder / f"{move}")
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    if rank == 0:
        publish_in_every_way(session, model, folder)
        session.dismiss()
    else:
        session.follow()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_program(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # all is written and left; how the libraries' threads end with a process is not tested
