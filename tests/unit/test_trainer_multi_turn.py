"""Case D11 as far as it applies: whatever an episode is told between its turns, every sampled token is trained alike."""

import math

import numpy as np
import pytest

from laminar.types import Chain, FinishReason, Purpose, SamplingParameters, Trajectory, Turn, WeightVersion, given, sampled
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.batch_metrics import batch_metrics
from trainer.batches import Layout
from trainer.plan import build_rows, plan_step

V = WeightVersion(0, 0)
FIRST, SECOND = ([5, 6], [-0.1, -0.2]), ([7, 8, 9], [-0.3, -0.4, -0.5])


def trajectory(name, reward, *chains, counts=None):
    return Trajectory(
        trajectory_id=name,
        group_id="g",
        prompt_id="p",
        member=0,
        attempt=0,
        purpose=Purpose.TRAIN,
        sampling=SamplingParameters(1.0, 8, 0),
        chains=tuple(Chain(tuple(segments)) for segments in chains),
        finish_reason=FinishReason.STOP,
        reward=reward,
        turns=(Turn(0, 1, 3, FinishReason.STOP), Turn(len(chains) - 1, 4, 7, FinishReason.STOP)),
        counts=counts or {},
    )


def two_turns(name, reward, observation):
    between = [given(observation)] if observation else []
    return trajectory(
        name, reward, [given([1]), sampled(*FIRST, V), *between, sampled(*SECOND, V), given([2] * len(observation))]
    )


def two_chains(name, reward):
    return trajectory(name, reward, [given([1]), sampled(*FIRST, V)], [given([1, 3, 4]), sampled(*SECOND, V)])


def trained_tokens(group):
    """(id, log-prob, advantage, trained tokens of its trajectory) of every trained token of the better sibling."""
    algorithm = PolicyGradient(GrpoOptions())
    plan = plan_step([group], algorithm, mini_batches=1, max_tokens=64, num_ranks=1, layout=Layout.PADDED)
    rows = [row for row in build_rows(plan.rows, group, 0) if row.shape.name == "good"]
    return [
        (int(token), float(logprob), row.advantage, row.sequence_tokens)
        for row in rows
        for token, logprob in zip(row.token_ids[row.mask], row.rollout_logprobs[row.mask], strict=True)
    ]


@pytest.mark.parametrize(
    "better",
    [two_turns("good", 1.0, [3] * 1), two_turns("good", 1.0, [3] * 9), two_turns("good", 1.0, []), two_chains("good", 1.0)],
    ids=["a short observation", "a long one", "none", "two chains"],
)
def test_every_sampled_token_gets_the_trajectorys_advantage_whatever_lies_between(better):
    # Rewards 1 and 0, sample std sqrt(1/2): the better sibling has (1 - 1/2) / sqrt(1/2).
    tokens = trained_tokens([better, two_turns("bad", 0.0, [3])])
    assert [token for token, *_ in tokens] == [5, 6, 7, 8, 9]
    assert [logprob for _, logprob, *_ in tokens] == np.float32([-0.1, -0.2, -0.3, -0.4, -0.5]).tolist()
    assert [advantage for *_, advantage, _ in tokens] == pytest.approx([math.sqrt(0.5)] * 5, abs=1e-4)
    assert {count for *_, count in tokens} == {5}


def test_turns_chains_and_counts_are_means_over_trajectories():
    group = [
        trajectory(
            "a", 1.0, [given([1]), sampled(*FIRST, V)], [given([1]), sampled(*SECOND, V)], counts={"malformed_calls": 3}
        ),
        two_turns("b", 0.0, [3]),
    ]
    metrics = batch_metrics([group], trained_on=0)
    assert metrics["rollout/turns_mean"] == 2
    assert metrics["rollout/chains_mean"] == 1.5
    assert metrics["rollout/count_malformed_calls"] == 1.5
