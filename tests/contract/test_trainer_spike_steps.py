"""A spike in a real step: told, left out as if it had not been, or the end; at every ZeRO stage, with the sample's name."""

import dataclasses

import numpy as np
import pytest
import torch

from laminar.config.root import LaminarConfig
from laminar.errors import RunFailedError
from laminar.types import Chain, FinishReason, Purpose, SamplingParameters, Trajectory, WeightVersion, given, sampled
from trainer.engine import TrainerEngine
from trainer.session import build_algorithm
from trainer.step import train_step

pytestmark = pytest.mark.heavy

CALM = 6


def make_groups(step, *, spoilt=False):
    """One group of three; spoilt: the engine claims to have sampled one answer's tokens as all but impossible."""
    random, members = np.random.default_rng(step), []
    for member in range(3):
        logprobs = random.normal(-3.7, 0.1, 4) - 8.0 * (spoilt and member == 1)
        answer = sampled(random.integers(1, 40, 4), logprobs, WeightVersion(0, 0))
        members.append(
            Trajectory(
                f"{step}-{member:03d}", str(step), "p", member, 1, Purpose.TRAIN, SamplingParameters(1.0, 8, 0),
                (Chain((given([3, 4, 5]), answer)),), FinishReason.STOP, [1.0, 0.0, 0.5][member],
            )
        )  # fmt: skip
    return (tuple(members),)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True)).save_pretrained(path)
    return path


def make_run(model, ranks, action, kind="aipo", stage=0, dtype="float32", options=None, **trainer):
    settings = {"action": action, "min_updates": CALM, "factor": 30.0}
    config = LaminarConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
            "data": {"path": "-"},
            "staleness": {"max_staleness": 16},
            "trainer": {
                "learning_rate": 1e-3,
                "max_grad_norm": 1e-3,
                "algorithm": {"kind": kind, "options": options or ({"clip_high": 1e6} if kind == "aipo" else {})},
                "deepspeed": {"zero_stage": stage},
                "spikes": settings,
                **trainer,
            },
        }
    )
    algorithm = build_algorithm(config)
    return TrainerEngine(config, ranks, algorithm.needs), algorithm


def calm_steps(engine, algorithm):
    for step in range(1, CALM + 1):
        report = train_step(engine, algorithm, make_groups(step), step)
        assert (report.skipped_reason, report.notices) == (None, ())


def state(engine):
    critic = {} if engine.critic is None else dict(engine.critic.state_tensors())
    tensors = dict(engine.state_tensors()) | engine.optimizer_tensors() | {f"critic.{n}": t for n, t in critic.items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, "float32"),
        pytest.param(1, "float32", marks=pytest.mark.slow),
        pytest.param(2, "float32", marks=pytest.mark.slow),
        pytest.param(0, "bfloat16", marks=pytest.mark.slow),
        pytest.param(2, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_spike_is_skipped_as_if_it_had_not_been_and_names_the_sample(stage, dtype, model, ranks):
    engine, algorithm = make_run(model, ranks, "skip", stage=stage, dtype=dtype)
    calm_steps(engine, algorithm)
    before = state(engine)
    report = train_step(engine, algorithm, make_groups(7, spoilt=True), 7)
    assert "spike: " in report.skipped_reason
    assert "trajectory 7-001 has the largest share in the loss" in report.skipped_reason
    assert "0 of 1 updates were applied" in report.skipped_reason
    assert report.trained_tokens == 0
    assert same(state(engine), before)
    report = train_step(engine, algorithm, make_groups(8), 8)
    assert report.skipped_reason is None
    assert not same(state(engine), before)


@pytest.mark.parametrize(("aggregation", "share"), [("token_mean", "82.4%"), ("sequence_mean", "70.1%")])
@pytest.mark.parametrize("max_tokens", [7, 8192])
def test_the_share_in_the_loss_is_that_of_all_chains_of_all_micro_batches(max_tokens, aggregation, share, model, ranks):
    """Ratios far beyond the clips: a token costs 1.28 (advantage 1), 3 (-1) or 0; one answer has two chains of 4 tokens.

    All tokens: 8 x 3 of 8 x 3 + 4 x 1.28; by means of sequences: 3 of 3 + 1.28.
    """
    options = {"dual_clip": 3.0, "clip_high": 0.28, "aggregation": aggregation}
    engine, algorithm = make_run(model, ranks, "notice", kind="grpo", options=options, max_tokens_per_micro_batch=max_tokens)
    engine.spikes.load_state({"loss": [1e9] * CALM, "KL": [1e-6] * CALM})
    (group,) = make_groups(1)
    chain = Chain((given([3, 4, 5]), sampled([9, 8, 7, 6], [-50.0] * 4, WeightVersion(0, 0))))
    chains = [(chain,), (chain, chain), (chain,)]
    group = tuple(dataclasses.replace(member, chains=own) for member, own in zip(group, chains, strict=True))
    (notice,) = train_step(engine, algorithm, (group,), 1).notices
    assert notice.endswith(f"trajectory 1-001 has the largest share in the loss, {share} (of absolute token losses)")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "float32"), (2, "float32"), (0, "bfloat16")])
def test_a_gradient_norm_alone_is_enough(stage, dtype, model, ranks):
    """Loss and KL are as ever; the norm's limit is set below what the next gradient has."""
    engine, algorithm = make_run(model, ranks, "skip", stage=stage, dtype=dtype)
    calm_steps(engine, algorithm)
    known = engine.spikes.state()
    engine.spikes.load_state({"loss": [1e9] * CALM, "KL": [1e9] * CALM, "gradient norm": [1e-6] * CALM})
    before = state(engine)
    report = train_step(engine, algorithm, make_groups(7), 7)
    assert report.skipped_reason.startswith("spike: gradient norm ")
    assert same(state(engine), before)
    engine.spikes.load_state(known)
    assert train_step(engine, algorithm, make_groups(7), 7).skipped_reason is None


@pytest.mark.slow
def test_a_notice_leaves_the_update_alone(model, ranks):
    told, silent = (make_run(model, ranks, action) for action in ("notice", "off"))
    reports = []
    for engine, algorithm in (told, silent):
        calm_steps(engine, algorithm)
        reports.append(train_step(engine, algorithm, make_groups(7, spoilt=True), 7))
    assert [report.skipped_reason for report in reports] == [None, None]
    assert "trajectory 7-001" in reports[0].notices[0]
    assert reports[1].notices == ()
    assert same(state(told[0]), state(silent[0]))


@pytest.mark.slow
def test_a_run_can_be_ended_before_the_update(model, ranks):
    engine, algorithm = make_run(model, ranks, "stop")
    calm_steps(engine, algorithm)
    before = state(engine)
    with pytest.raises(RunFailedError, match=r"trajectory 7-001 .*the last checkpoint stands"):
        train_step(engine, algorithm, make_groups(7, spoilt=True), 7)
    assert same(state(engine), before)


@pytest.mark.slow
def test_the_critic_is_left_as_it_was_too(model, ranks):
    engine, algorithm = make_run(model, ranks, "skip", kind="ppo")
    calm_steps(engine, algorithm)
    engine.spikes.load_state({"KL": [1e-9] * CALM})
    before = state(engine)
    assert train_step(engine, algorithm, make_groups(7, spoilt=True), 7).skipped_reason.startswith("spike: KL")
    assert same(state(engine), before)


@pytest.mark.parametrize(("action", "stage"), [("notice", 0), ("notice", 1), ("stop", 1), ("stop", 2)])
def test_an_undefined_gradient_is_no_spike_and_ends_no_run(action, stage, model, ranks):
    """The second answer's log-probs are spoilt in the forward pass; the third's loss is the largest."""
    engine, algorithm = make_run(model, ranks, action, stage=stage)
    calm_steps(engine, algorithm)
    forward = engine.forward

    def spoil(batch, **settings):
        logprobs, entropy = forward(batch, **settings)
        factor = torch.tensor([float("nan") if name == "7-001" else 1.0 for name in batch.names])
        return logprobs * factor[:, None], entropy

    engine.forward = spoil
    before = state(engine)
    report = train_step(engine, algorithm, make_groups(7), 7)
    assert report.skipped_reason == "trajectory 7-001 got a log-prob that is not finite; 0 of 1 updates were applied"
    assert same(state(engine), before)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_undefined_value_loss_leaves_policy_and_critic_as_they_were_and_names_the_sample(stage, model, ranks):
    engine, algorithm = make_run(model, ranks, "notice", kind="ppo", stage=stage)
    forward = engine.critic.forward

    def spoil(batch, **settings):
        factor = torch.tensor([float("nan") if name == "1-001" else 1.0 for name in batch.names])
        return forward(batch, **settings) * factor[:, None]

    engine.critic.forward = spoil
    before = state(engine)
    report = train_step(engine, algorithm, make_groups(1), 1)
    assert report.skipped_reason == "trajectory 1-001 got a value loss that is not finite; 0 of 1 updates were applied"
    assert report.trained_tokens == 0
    assert same(state(engine), before)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_undefined_gradient_of_the_critic_leaves_policy_and_critic_as_they_were(stage, model, ranks):
    """Its loss is finite."""
    engine, algorithm = make_run(model, ranks, "notice", kind="ppo", stage=stage)
    backward = engine.critic.backward
    engine.critic.backward = lambda loss: backward(loss * float("nan"))
    before = state(engine)
    report = train_step(engine, algorithm, make_groups(1), 1)
    assert report.skipped_reason == "the critic's gradient is not finite; 0 of 1 updates were applied"
    assert report.trained_tokens == 0
    assert same(state(engine), before)
    engine.critic.backward = backward
    assert train_step(engine, algorithm, make_groups(2), 2).skipped_reason is None


def test_a_policys_update_counts_when_only_the_norm_of_the_critics_gradient_is_infinite(model, ranks):
    """It is known only when the policy's update has been made; gradients near 1e28 are finite, their squares are not."""
    engine, algorithm = make_run(model, ranks, "notice", kind="ppo")
    backward = engine.critic.backward
    engine.critic.backward = lambda loss: backward(loss * 1e28)
    before = dict(state(engine))
    report = train_step(engine, algorithm, make_groups(1), 1)
    told = "the critic's gradient norm is inf, so only the policy had the last update; 1 of 1 updates were applied"
    assert report.skipped_reason == told
    assert report.trained_tokens == 12
    after = state(engine)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any(name.startswith("critic.") for name in moved)


def test_undefined_numbers_still_name_their_own_sample(model, ranks):
    engine, algorithm = make_run(model, ranks, "skip")
    (group,) = make_groups(1)
    broken = dataclasses.replace(group[2], chains=(Chain((given([3]), sampled([5], [float("nan")], WeightVersion(0, 0)))),))
    report = train_step(engine, algorithm, ((*group[:2], broken),), 1)
    assert "trajectory 1-002 has rollout log-prob nan" in report.skipped_reason
