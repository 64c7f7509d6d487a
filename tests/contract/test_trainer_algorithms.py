"""Every algorithm, KL term and correction through the real step: the update of a plain float64 loop, whatever the split."""

import importlib.util
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.telemetry.registry import check_declared
from trainer import checkpoint
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions, PpoOptions
from trainer.engine import TrainerEngine
from trainer.session import build_algorithm
from trainer.step import train_step

pytestmark = pytest.mark.heavy

spec = importlib.util.spec_from_file_location("algorithm_oracle", Path(__file__).with_name("algorithm_oracle.py"))
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)
CASES, UPDATES, make_groups = reference.CASES, reference.UPDATES, reference.make_groups


def save_model(path, seed, vocab_size=41):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(**config, num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The policy, and another model as reference."""
    return [save_model(tmp_path_factory.mktemp("model"), seed) for seed in (0, 1)]


def make_config(models, case, **trainer):
    kind, options, correction = CASES[case]
    settings = {
        "learning_rate": reference.LEARNING_RATE,
        "adam_epsilon": 1.0,
        "max_grad_norm": reference.MAX_NORM,
        "critic_learning_rate": 2 * reference.LEARNING_RATE,
        "algorithm": {"kind": kind, "options": options},
        "correction": correction,
    }
    return LaminarConfig.model_validate(
        {"model": {"path": models[0], "reference": models[1]}, "data": {"path": "-"}, "trainer": settings | trainer}
    )


@pytest.fixture(scope="module")
def oracle(models):
    known = {}

    def train(case, updates):
        if (case, updates) not in known:
            known[case, updates] = reference.Oracle(models, case, UPDATES[updates]).train()
        return known[case, updates]

    return train


def run_step(config, ranks):
    algorithm = build_algorithm(config)
    engine = TrainerEngine(config, ranks, algorithm.needs)
    groups = make_groups(greedy=config.trainer.algorithm.kind == "remax")
    return engine, train_step(engine, algorithm, groups, 1)


SPLITS = {
    "small": {"max_tokens_per_micro_batch": 24},
    "whole": {},
    "unshared": {"max_tokens_per_micro_batch": 20, "share_prompts": False},
    "zero2": {"max_tokens_per_micro_batch": 24, "deepspeed": {"zero_stage": 2}},
}


def weights(engine):
    critic = {} if engine.critic is None else dict(engine.critic.state_tensors())
    return dict(engine.state_tensors()) | {f"critic.{name}": tensor for name, tensor in critic.items()}


def assert_same_update(case, updates, split, models, ranks, oracle):
    expected, loss = oracle(case, updates)
    engine, report = run_step(make_config(models, case, **UPDATES[updates], **SPLITS[split]), ranks)
    assert report.skipped_reason is None
    assert report.metrics["train/loss"] == pytest.approx(loss, abs=2e-6)
    assert weights(engine).keys() == expected.keys()
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(tensor.double(), expected[name].detach(), rtol=1e-4, atol=2e-6, msg=name)
    check_declared(report.metrics)


FAST = ("ppo", "gspo", "kl in loss and entropy", "reinforce++, kl in reward", "decoupled, sequence mis", "geometric mask")
"""Between them they walk every path of the step; the others differ in pure functions, which have tests of their own."""


@pytest.mark.parametrize("case", FAST)
def test_the_updates_of_a_step_are_those_of_a_plain_loop(case, models, ranks, oracle):
    assert_same_update(case, "mini-batches and epochs", "small", models, ranks, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("case", CASES)
def test_no_split_of_the_work_changes_them(case, updates, split, models, ranks, oracle):
    assert_same_update(case, updates, split, models, ranks, oracle)


def test_a_reference_kept_on_the_cpu_gives_the_same_update(models, ranks, oracle):
    expected, _ = oracle("kl in loss and entropy", "mini-batches and epochs")
    config = make_config(models, "kl in loss and entropy", keep_reference_on="cpu", **UPDATES["mini-batches and epochs"])
    engine, report = run_step(config, ranks)
    assert report.metrics["train/kl"] > 0
    for name, tensor in engine.state_tensors():
        torch.testing.assert_close(tensor.double(), expected[name].detach(), rtol=1e-4, atol=2e-6, msg=name)


def test_several_epochs_train_each_token_once_more_but_count_it_once(models, ranks):
    _, report = run_step(make_config(models, "dr_grpo", mini_batches=2, epochs=3), ranks)
    assert (
        report.trained_tokens
        == report.metrics["train/tokens"]
        == sum(int(chain.mask().sum()) for group in make_groups() for t in group for chain in t.chains)
    )


def test_the_share_of_a_devices_arithmetic_is_that_of_the_trained_rows_in_every_epoch(models, ranks):
    engine, report = run_step(make_config(models, "dr_grpo", mini_batches=2, epochs=3, peak_flops=1e9), ranks)
    config, metrics = engine.model.config, report.metrics
    width = config.num_hidden_layers * config.hidden_size
    rows = [chain.num_tokens for group in make_groups() for t in group for chain in t.chains]
    parameters = sum(parameter.numel() for parameter in engine.model.parameters())
    flops = 6 * parameters * sum(rows) + 12 * width * sum(n * n for n in rows)
    seconds = metrics["time/forward_backward_seconds"] + metrics["time/optimizer_seconds"]
    assert metrics["throughput/model_flops_utilisation"] * 1e9 * seconds == pytest.approx(3 * flops)
    check_declared(metrics)


def test_a_step_whose_trajectories_are_all_dropped_is_skipped_with_the_reason(models, ranks):
    config = make_config(models, "k3 mask", correction={"max_k3": 1e-9})
    engine, report = run_step(config, ranks)
    assert report.skipped_reason == "trainer.correction dropped every trajectory"
    assert report.trained_tokens == 0
    assert report.metrics["mismatch/masked_ratio"] == 1
    initial = TrainerEngine(config, ranks)
    assert all(torch.equal(tensor, dict(initial.state_tensors())[name]) for name, tensor in engine.state_tensors())


def test_a_broken_reference_skips_the_step_and_names_a_trajectory(models, ranks):
    config = make_config(models, "kl in loss and entropy")
    algorithm = build_algorithm(config)
    engine = TrainerEngine(config, ranks, algorithm.needs)
    next(iter(engine.reference.parameters())).data.fill_(torch.nan)
    before = {name: tensor.clone() for name, tensor in engine.state_tensors()}
    report = train_step(engine, algorithm, make_groups(), 1)
    assert "trajectory 0-0 got ref_logprobs that are not finite" in report.skipped_reason
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_tensors())


class Spoilt(PolicyGradient):
    """Gives undefined losses, or undefined advantages."""

    def __init__(self, options, what):
        super().__init__(options)
        self.what = what

    def token_advantages(self, advantage, scores):
        values = super().token_advantages(advantage, scores)
        return values * math.nan if self.what == "advantages" and advantage > 0 else values

    def policy_loss(self, batch):
        loss = super().policy_loss(batch)
        return loss if self.what != "loss" else replace(loss, losses=loss.losses + torch.where(batch.mask, torch.inf, 0.0))


class Observing(PolicyGradient):
    """Says of a batch what JSON has no word for."""

    def observe(self, groups):
        return {"reward/count": np.float64(2.0), "reward/spread": np.float32("nan"), "reward/top": math.inf}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_metrics_that_are_no_numbers_are_left_out_and_named(models, ranks, caplog):
    """Rewards of 1e200 have a mean, but their standard deviation is beyond a float64."""
    algorithm = Observing(GrpoOptions())
    engine = TrainerEngine(make_config(models, "dr_grpo"), ranks, algorithm.needs)
    groups = [tuple(replace(t, reward=1e200 * t.member) for t in group) for group in make_groups()]
    report = train_step(engine, algorithm, groups, 1)
    assert report.skipped_reason is None
    assert report.metrics["reward/count"] == 2.0
    for name in ("reward/spread", "reward/top", "reward/std"):
        assert name not in report.metrics
        assert f"step 1: {name} is " in caplog.text


@pytest.mark.parametrize("what", ["advantages", "loss"])
def test_an_undefined_number_of_the_algorithm_skips_the_step_and_names_a_trajectory(what, models, ranks):
    algorithm = Spoilt(PpoOptions(whiten=False), what)
    engine = TrainerEngine(make_config(models, "ppo"), ranks, algorithm.needs)
    before = {name: tensor.clone() for name, tensor in weights(engine).items()}
    report = train_step(engine, algorithm, make_groups(), 1)
    assert re.search(rf"trajectory \d-\d got (a )?{what} that (is|are) not finite", report.skipped_reason)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_critic_goes_on_as_if_it_had_never_stopped(stage, models, ranks, tmp_path):
    config = make_config(models, "ppo", deepspeed={"zero_stage": stage})
    algorithm = build_algorithm(config)
    engine, _ = run_step(config, ranks)
    folder = checkpoint.save(tmp_path, 1, engine, {}, keep=1)
    resumed = TrainerEngine(config, ranks, algorithm.needs)
    checkpoint.load(folder, resumed)
    metrics = [train_step(e, algorithm, make_groups(), 2).metrics for e in (engine, resumed)]
    assert metrics[0]["train/value_loss"] == metrics[1]["train/value_loss"] > 0
    assert all(torch.equal(tensor, weights(engine)[name]) for name, tensor in weights(resumed).items())
    assert any(float(tensor.detach().abs().sum()) for name, tensor in weights(resumed).items() if "critic.head" in name)


def test_a_checkpoint_without_a_critic_is_refused_by_an_algorithm_that_has_one(models, ranks, tmp_path):
    engine, _ = run_step(make_config(models, "dr_grpo"), ranks)
    folder = checkpoint.save(tmp_path, 1, engine, {}, keep=1)
    with pytest.raises(ConfigError, match="is of a run without a critic"):
        checkpoint.load(folder, TrainerEngine(make_config(models, "ppo"), ranks, frozenset({"values"})))


def test_a_reference_of_another_vocabulary_is_refused(models, ranks, tmp_path):
    other = save_model(tmp_path / "other", 0, vocab_size=43)
    with pytest.raises(ConfigError, match=r"model.reference .* has 43 token ids, the policy 41"):
        TrainerEngine(make_config([models[0], other], "kl in loss and entropy"), ranks, frozenset({"ref_logprobs"}))
