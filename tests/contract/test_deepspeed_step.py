"""The training step on real DeepSpeed: the update of a plain loop, whatever the split, the ranks and the ZeRO stage.

The file is its own rank program: the tests of two ranks start it twice.
"""

import json
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
from laminar.types import Chain, FinishReason, Purpose, SamplingParameters, Trajectory, WeightVersion, given, sampled
from trainer import checkpoint
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.engine import TrainerEngine
from trainer.ranks import join_ranks
from trainer.step import train_step

pytestmark = pytest.mark.heavy

SETTINGS = {"adam_epsilon": 1.0, "learning_rate": 0.5, "max_grad_norm": 0.7}
"""So large an epsilon makes an update proportional to the gradient, and so comparable."""


def make_groups(seed=0, num_groups=5, poison=False):
    """Groups of 3 with prompts and answers of unlike lengths; one trajectory has a tool's answer in the middle."""
    random = np.random.default_rng(seed)
    groups = []
    for group in range(num_groups):
        prompt = given(random.integers(1, 40, 3 + group))
        members = []
        for member in range(3):
            lengths = [2, 3] if (group, member) == (1, 1) else [1 + int(random.integers(0, 6))]
            segments = [prompt]
            for length in lengths:
                logprobs = random.normal(-3.7, 0.3, length)
                segments.append(sampled(random.integers(1, 40, length), logprobs, WeightVersion(0, 0)))
                segments.append(given(random.integers(1, 40, 2)))
            name = f"{group}-{member}"
            if poison and name == "3-1":
                segments[1].logprobs[0] = np.nan
            reward, sampling = float(random.integers(0, 3)), SamplingParameters(0.8, 8, 0)
            chains = (Chain(tuple(segments)),)
            members.append(
                Trajectory(name, str(group), "p", member, 1, Purpose.TRAIN, sampling, chains, FinishReason.STOP, reward)
            )
        groups.append(tuple(members))
    return groups


def make_config(model, **trainer):
    return LaminarConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"path": "-"},
            "trainer": SETTINGS | trainer,
            "staleness": {"max_staleness": "unbounded"},  # the same old groups serve every step
        }
    )


def train(config, ranks, steps=2, fetch_all=False):
    """Some steps on fixed batches: the engine, and what it reported."""
    engine = TrainerEngine(config, ranks)
    reports = []
    for step in range(1, steps + 1):
        groups = make_groups(step)
        by_id = {group[0].group_id: group for group in groups}
        own = groups if ranks.is_first else None
        reports.append(
            train_step(
                engine, PolicyGradient(GrpoOptions()), own, step, fetch=lambda ids, by_id=by_id: [by_id[i] for i in ids]
            )
        )
    return engine, reports


def weights(engine):
    return {name: tensor.detach().clone() for name, tensor in engine.state_tensors()}


def plain_loop(model_path, steps=2):
    """The same training without our code: one row at a time, no padding, one AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path)
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.9, 0.99), eps=1.0, weight_decay=0.0)
    losses, norms = [], []
    for step in range(1, steps + 1):
        terms, tokens = [], 0
        for group in make_groups(step):
            rewards = np.array([member.reward for member in group])
            scale = rewards.std(ddof=1) + 1e-6
            for member, reward in zip(group, rewards, strict=True):
                chain = member.chains[0]
                ids = torch.tensor(chain.token_ids(), dtype=torch.int64)
                places = torch.tensor(np.flatnonzero(chain.mask()))
                logits = model(input_ids=ids[None]).logits[0] / 0.8
                ratio = (
                    logits.log_softmax(-1)[places - 1, ids[places]] - torch.tensor(chain.rollout_logprobs())[places]
                ).exp()
                advantage = (reward - rewards.mean()) / scale
                terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum())
                tokens += len(places)
        loss = sum(terms) / tokens
        adam.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)))
        adam.step()
        losses.append(loss.item())
    return dict(model.named_parameters()), losses, norms


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**config, num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(model_path):
    return plain_loop(model_path)


def assert_same_training(own, reports, reference):
    expected, losses, norms = reference
    assert [report["train/loss"] for report in reports] == pytest.approx(losses, abs=1e-6)
    assert [report["train/grad_norm"] for report in reports] == pytest.approx(norms, rel=1e-5)
    assert own.keys() == expected.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"share_prompts": False},
        {"max_tokens_per_micro_batch": 20},
        {"max_tokens_per_micro_batch": 24, "deepspeed": {"zero_stage": 1}},
        {"max_tokens_per_micro_batch": 24, "deepspeed": {"zero_stage": 2}},
        {"gradient_checkpointing": True},
    ],
    ids=["whole", "unshared", "split", "zero1", "zero2", "checkpointing"],
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
    assert engine.optimizer_tensors()["weights.0.0"].dtype == torch.float32
    assert reports[0].metrics["train/loss"] == pytest.approx(plain_loop(model_path, 1)[1][0], abs=0.02)


def test_an_undefined_logprob_skips_the_step_names_the_sample_and_leaves_the_weights(model_path, ranks):
    engine = TrainerEngine(make_config(model_path), ranks)
    before = weights(engine)
    report = train_step(engine, PolicyGradient(GrpoOptions()), make_groups(poison=True), 1)
    assert "trajectory 3-1 " in report.skipped_reason
    assert report.trained_tokens == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_tensors())


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_broken_weights_skip_the_update_and_the_next_good_one_is_applied(zero_stage, model_path, ranks):
    engine = TrainerEngine(make_config(model_path, deepspeed={"zero_stage": zero_stage}), ranks)
    norm = engine.model.model.norm.weight
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


def test_a_checkpoint_of_another_number_of_ranks_is_refused(model_path, ranks, tmp_path):
    engine = TrainerEngine(make_config(model_path, deepspeed={"zero_stage": 1}), ranks)
    folder = checkpoint.save(tmp_path, 1, engine, {}, keep=1)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"optimizer_shares": 2}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="2 shares of optimizer state"):
        checkpoint.load(folder, engine)


@pytest.mark.e2e
def test_two_ranks_train_as_one_at_every_zero_stage_and_resume(model_path, tmp_path, reference, ranks, run_two_ranks):
    run_two_ranks(__file__, model_path, tmp_path)
    for rank in range(2):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for case in ("zero0", "zero1", "zero2", "resumed"):
            tensors = load_file(tmp_path / f"{case}-rank{rank}.safetensors")
            assert_same_training(tensors, result[case], reference)
        assert result["scored"] == pytest.approx(train_with_everything(model_path, ranks), rel=1e-4, abs=1e-6)
        assert "trajectory 3-1 " in result["poisoned"]
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


def rank_program(model, folder, port, rank):
    """What each of the two ranks does; see the test above."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    ranks = join_ranks(rank, 2, store, collective_seconds=60)
    result = {}
    for stage in range(3):
        settings = {"deepspeed": {"zero_stage": stage}, "max_tokens_per_micro_batch": 24}
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
