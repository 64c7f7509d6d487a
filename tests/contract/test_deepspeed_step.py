"""The training step on real DeepSpeed: the update of a plain loop, whatever the split, the ranks and the ZeRO stage.

The file is its own rank program: the tests of two ranks start it twice.
"""

import importlib.util
import json
import os
import re
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.telemetry.registry import check_declared
from trainer import checkpoint
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.engine import TrainerEngine
from trainer.ranks import join_ranks
from trainer.step import train_step
from trainer.trained_module import TrainedModule

spec = importlib.util.spec_from_file_location("step_oracle", Path(__file__).with_name("step_oracle.py"))
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)
assert_same_training, make_config, make_groups = oracle.assert_same_training, oracle.make_config, oracle.make_groups
plain_loop, train, weights = oracle.plain_loop, oracle.train, oracle.weights

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return oracle.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_path):
    return plain_loop(model_path)


def test_a_parameter_that_no_token_reached_ages_on_one_rank_too(ranks):
    """As on several, where DeepSpeed gives it a gradient of zeros: its weight decays, and its state can be saved."""

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))

        def forward(self):
            return self.used.sum()

    module = Half()
    config = LaminarConfig.model_validate(
        {
            "model": {"path": "-"},
            "data": {"path": "-"},
            "trainer": {"learning_rate": 0.1, "weight_decay": 0.5, "deepspeed": {"zero_stage": 0}},
        }
    )
    trained = TrainedModule(module, torch.float32, config.trainer, ranks)
    trained.set_boundary(is_last=True)
    trained.backward(trained())
    assert trained.update(0.1).applied
    torch.testing.assert_close(module.unused.detach(), torch.full((2,), 0.95))
    assert any("unused" in name for name in trained.optimizer_tensors())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"share_prompts": False},
        {"max_tokens_per_micro_batch": 20},
        {"max_tokens_per_micro_batch": 24, "deepspeed": {"zero_stage": 1}},
        {"max_tokens_per_micro_batch": 24, "deepspeed": {"zero_stage": 2}},
        {"max_tokens_per_micro_batch": 24, "deepspeed": {"zero_stage": 3, "max_whole_parameter": 0}},
        {"gradient_checkpointing": True},
        {"max_tokens_per_micro_batch": 24, "pack_rows": "on"},
    ],
    ids=["whole", "unshared", "split", "zero1", "zero2", "zero3", "checkpointing", "packed"],
)
def test_the_update_is_that_of_a_plain_loop(settings, model_path, ranks, reference):
    engine, reports = train(make_config(model_path, **settings), ranks)
    assert_same_training(weights(engine), [report.metrics for report in reports], reference)
    check_declared(reports[0].metrics)
    assert reports[0].skipped_reason is None
    assert reports[0].trained_tokens == sum(int(t.chains[0].mask().sum()) for g in make_groups(1) for t in g)


def test_bfloat16_keeps_float32_weights_apart_and_learns(model_path, ranks):
    config = make_config(model_path).model_copy(
        update={"model": make_config(model_path).model.model_copy(update={"dtype": "bfloat16"})}
    )
    engine, reports = train(config, ranks)
    assert {tensor.dtype for tensor in weights(engine).values()} == {torch.bfloat16}
    assert engine.optimizer_tensors()["weights/0/model.model.norm.weight"].dtype == torch.float32
    assert reports[0].metrics["train/loss"] == pytest.approx(plain_loop(model_path, 1)[1][0], abs=0.02)


def test_an_undefined_logprob_skips_the_step_names_the_sample_and_leaves_the_weights(model_path, ranks):
    engine = TrainerEngine(make_config(model_path), ranks)
    before = weights(engine)
    report = train_step(engine, PolicyGradient(GrpoOptions()), make_groups(poison=True), 1)
    assert "trajectory 3-1 " in report.skipped_reason
    assert report.trained_tokens == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_tensors())


@pytest.mark.parametrize("zero_stage", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_broken_weights_skip_the_update_and_the_next_good_one_is_applied(zero_stage, model_path, ranks):
    engine = TrainerEngine(make_config(model_path, deepspeed={"zero_stage": zero_stage}), ranks)
    norm = engine.model.model.norm.weight
    norm = getattr(norm, "ds_tensor", norm)  # under ZeRO 3, this rank's share
    good = norm.detach().clone()
    norm.data[0] = torch.nan
    before = weights(engine)
    report = train_step(engine, PolicyGradient(GrpoOptions()), make_groups(), 1)
    assert re.search(r"trajectory \d-\d got a log-prob that is not finite", report.skipped_reason)
    for name, tensor in engine.state_tensors():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    norm.data.copy_(good)
    assert train_step(engine, PolicyGradient(GrpoOptions()), make_groups(), 2).skipped_reason is None


def test_a_row_over_the_budget_is_refused_by_name_before_any_work(model_path, ranks):
    engine = TrainerEngine(make_config(model_path, max_tokens_per_micro_batch=10), ranks)
    with pytest.raises(ConfigError, match=r"trajectory \d-\d has a row of"):
        train_step(engine, PolicyGradient(GrpoOptions()), make_groups(), 1)


@pytest.mark.parametrize("settings", [{}, {"deepspeed": {"zero_stage": 1}}], ids=["zero0", "zero1"])
def test_a_resumed_engine_goes_on_as_if_it_had_never_stopped(settings, model_path, ranks, tmp_path, reference):
    config = make_config(model_path, **settings)
    engine, reports = train(config, ranks, steps=1)
    folder = checkpoint.save(tmp_path, 1, engine, {"frontier": {"epoch": 0}}, keep=1)
    drawn = (torch.rand(3), np.random.rand(3))
    resumed = TrainerEngine(config, ranks)
    assert checkpoint.agree_on_latest(tmp_path, ranks) == folder
    assert checkpoint.load(folder, resumed) == (1, {"frontier": {"epoch": 0}})
    assert torch.equal(torch.rand(3), drawn[0])
    assert np.array_equal(np.random.rand(3), drawn[1])
    reports.append(train_step(resumed, PolicyGradient(GrpoOptions()), make_groups(2), 2))
    assert_same_training(weights(resumed), [report.metrics for report in reports], reference)
    again = TrainerEngine(make_config(folder / "model"), ranks)
    assert all(torch.equal(tensor, weights(engine)[name]) for name, tensor in again.state_tensors())


@pytest.mark.e2e
def test_two_ranks_train_as_one_at_every_zero_stage_and_resume(model_path, tmp_path, reference, ranks, run_two_ranks):
    run_two_ranks(__file__, model_path, tmp_path)
    for rank in range(2):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for case in ("zero0", "zero1", "zero2", "zero3", "resumed"):
            tensors = load_file(tmp_path / f"{case}-rank{rank}.safetensors")
            assert_same_training(tensors, result[case], reference)
        assert result["scored"] == pytest.approx(train_with_everything(model_path, ranks), rel=1e-4, abs=1e-6)
        assert "trajectory 3-1 " in result["poisoned"]
        assert result["spike"] == tell_a_spike(model_path, ranks)
        assert "could not write" in result["disk_full"]


def train_with_everything(model, ranks):
    """A step that needs proximal and reference log-probs, whole trajectories and the whole batch: its metrics but times."""
    config = make_config(
        model,
        mini_batches=2,
        epochs=2,
        max_tokens_per_micro_batch=24,
        correction={"weight": "sequence_tis", "geometric_max": 1.05},
        deepspeed={"zero_stage": 1},
    )
    options = {"kl_coef": 0.1, "whiten": True, "kl_in": "reward", "ratio_to": "proximal", "aggregation": "sequence_mean"}
    algorithm = PolicyGradient(GrpoOptions(**options))
    engine = TrainerEngine(config, ranks, algorithm.needs)
    groups = make_groups(1)
    by_id = {group[0].group_id: group for group in groups}
    own = groups if ranks.is_first else None
    report = train_step(engine, algorithm, own, 1, fetch=lambda ids: [by_id[i] for i in ids])
    assert 0 < report.metrics["mismatch/masked_ratio"] < 1
    leave_out = ("time/", "train/micro_batches")
    return {name: value for name, value in report.metrics.items() if not name.startswith(leave_out)} | {
        "weights": sum(float(tensor.double().abs().sum()) for _, tensor in engine.state_tensors())
    }


def tell_a_spike(model, ranks):
    """What is said of the trajectory with the largest share in the loss, after enough calm updates."""
    engine = TrainerEngine(make_config(model, max_grad_norm=1e-6), ranks)
    engine.spikes.load_state({"gradient norm": [1e-6] * 16})
    groups = make_groups(1)
    by_id = {group[0].group_id: group for group in groups}
    own = groups if ranks.is_first else None
    (notice,) = train_step(engine, PolicyGradient(GrpoOptions()), own, 1, fetch=lambda ids: [by_id[i] for i in ids]).notices
    return notice.partition("; ")[2]


def rank_program(model, folder, port, rank):
    """What each of the two ranks does; see the test above."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    ranks = join_ranks(rank, 2, store, collective_seconds=60)
    result = {}
    for stage in range(4):
        settings = {"deepspeed": {"zero_stage": stage, "max_whole_parameter": 40}, "max_tokens_per_micro_batch": 24}
        engine, reports = train(make_config(model, **settings), ranks)
        result[f"zero{stage}"] = [report.metrics for report in reports]
        save_file(weights(engine), folder / f"zero{stage}-rank{rank}.safetensors")
    config = make_config(model, deepspeed={"zero_stage": 2})
    engine, reports = train(config, ranks, steps=1)
    saved = checkpoint.save(folder / "checkpoints", 1, engine, {"of_rank": rank}, keep=1)
    resumed = TrainerEngine(config, ranks)
    assert checkpoint.load(checkpoint.agree_on_latest(folder / "checkpoints", ranks), resumed) == (1, {"of_rank": 0})
    groups = {group[0].group_id: group for group in make_groups(2)}
    own = list(groups.values()) if ranks.is_first else None
    reports.append(train_step(resumed, PolicyGradient(GrpoOptions()), own, 2, fetch=lambda ids: [groups[i] for i in ids]))
    result["resumed"] = [report.metrics for report in reports]
    save_file(weights(resumed), folder / f"resumed-rank{rank}.safetensors")
    result["spike"] = tell_a_spike(model, ranks)
    result["scored"] = train_with_everything(model, ranks)
    result["poisoned"] = train_step(resumed, PolicyGradient(GrpoOptions()), make_groups(poison=True), 3).skipped_reason
    result["disk_full"] = save_with_a_failing_rank(folder / "checkpoints", resumed, saved)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    ranks.leave()


def save_with_a_failing_rank(root, engine, saved):
    """Rank 1 cannot write its file; both must hear of it, and the older checkpoint must stay whole."""
    own = engine.optimizer_tensors
    if engine.ranks.rank == 1:

        def full():
            raise OSError("no space left on device")

        engine.optimizer_tensors = full
    try:
        checkpoint.save(root, 2, engine, {}, keep=1)
    except checkpoint.EnvironmentSetupError as error:
        engine.optimizer_tensors = own
        assert checkpoint.agree_on_latest(root, engine.ranks) == saved
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_program(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # all is written and left; how the libraries' threads end with a process is not tested
