"""The step's plan and the batch's metrics: D05 and D10 numbers, denominators, names of what cannot be trained."""

import math
from itertools import chain

import numpy as np
import pytest

from laminar.telemetry.registry import check_declared
from laminar.types import (
    Chain,
    Failure,
    FailureKind,
    FinishReason,
    Purpose,
    SamplingParameters,
    Trajectory,
    WeightVersion,
    given,
    sampled,
)
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.batch_metrics import batch_metrics
from trainer.batches import Layout
from trainer.plan import StepPlan, build_rows, plan_step


def trajectory(name, tokens, reward=0.0, *, group="g", finish=FinishReason.STOP, versions=(0, 0), logprob=-1.0, chains=1):
    """`tokens` sampled tokens a chain, the first by versions[0], the others by versions[1]."""
    first = sampled([5], [logprob], WeightVersion(0, versions[0]))
    rest = sampled([6] * (tokens - 1), [-1.0] * (tokens - 1), WeightVersion(0, versions[1]))
    segments = (given([1, 2]), first, rest) if tokens > 1 else (given([1, 2]), first)
    return Trajectory(
        trajectory_id=name,
        group_id=group,
        prompt_id="p",
        member=0,
        attempt=1,
        purpose=Purpose.TRAIN,
        sampling=SamplingParameters(1.0, 8, 0),
        chains=(Chain(segments),) * chains,
        finish_reason=finish,
        reward=reward,
        reward_terms={"match": reward},
    )


def failed(name):
    return Trajectory(
        name,
        "g",
        "p",
        0,
        1,
        Purpose.TRAIN,
        SamplingParameters(1.0, 8, 0),
        (),
        None,
        None,
        failure=Failure(FailureKind.TOOL, ""),
    )


def plan_of(*groups, options=None, mini_batches=1, num_ranks=1):
    algorithm = PolicyGradient(options or GrpoOptions())
    return plan_step(groups, algorithm, mini_batches=mini_batches, max_tokens=64, num_ranks=num_ranks, layout=Layout.SHARED)


D10 = [
    trajectory("a", 3, 0.0),
    trajectory("b", 2, 1.0),
    trajectory("c", 4, 0.0, finish=FinishReason.LENGTH),
    trajectory("d", 4, 1.0),
]


@pytest.mark.parametrize(("mask_truncated", "tokens", "rows"), [(False, 13, 4), (True, 9, 3)])
def test_truncated_trajectories_leave_the_denominator_and_the_rows_together(mask_truncated, tokens, rows):
    plan = plan_of(D10, options=GrpoOptions(mask_truncated=mask_truncated))
    assert plan.mini_batches[0].denominator == plan.mini_batches[0].num_tokens == tokens
    assert len(plan.rows) == rows
    assert sum(row.advantage for row in plan.rows if row.trajectory_id in "ab") == pytest.approx(0)


def test_a_batch_of_truncated_trajectories_is_skipped_with_a_reason():
    plan = plan_of([trajectory("a", 3, finish=FinishReason.LENGTH)], options=GrpoOptions(mask_truncated=True))
    assert plan.skipped == "the batch has no token to train"
    assert plan.mini_batches == ()


CUT = [trajectory("a", 3, 0.0, finish=FinishReason.LENGTH), trajectory("b", 3, 1.0, finish=FinishReason.MAX_TOKENS)]


@pytest.mark.parametrize(
    ("group", "is_kept"),
    [(CUT, False), ([*CUT, failed("c")], False), ([*CUT, trajectory("c", 2, 0.0)], True)],
    ids=["all cut", "all cut or failed", "one whole"],
)
@pytest.mark.parametrize("filters", [True, False])
def test_a_group_without_an_answer_to_train_is_not_kept(group, is_kept, filters):
    """Even if its rewards differ: it would fill a place in the batch and train nothing."""
    masking = GrpoOptions(mask_truncated=True, filter_zero_variance=filters)
    assert PolicyGradient(masking).keeps(group) is is_kept
    assert PolicyGradient(GrpoOptions(filter_zero_variance=filters)).keeps(group)


def test_lengths_are_counted_before_masks_and_truncation_by_stop_reason():
    metrics = batch_metrics([D10], trained_on=0)
    assert metrics["rollout/truncated_ratio"] == 0.25
    assert metrics["rollout/response_tokens_mean"] == 3.25
    assert metrics["rollout/response_tokens_finished_mean"] == 3.0
    assert metrics["rollout/response_tokens_min"] == 2
    assert metrics["rollout/response_tokens_sum"] == 13
    none = batch_metrics([[trajectory("a", 2, finish=FinishReason.LENGTH)]], trained_on=0)
    assert "rollout/response_tokens_finished_mean" not in none


def test_rewards_and_staleness_are_of_trajectories_without_failure():
    groups = [[trajectory("a", 2, 1.0, versions=(3, 4)), trajectory("b", 2, 3.0, versions=(5, 5)), failed("c")]]
    metrics = batch_metrics(groups, trained_on=5)
    assert (metrics["reward/mean"], metrics["reward/std"], metrics["reward/min"], metrics["reward/max"]) == (2, 1, 1, 3)
    lag = [metrics[f"staleness/versions_{what}"] for what in ("min", "mean", "max")]
    assert lag == [0, 1, 2]
    assert (metrics["staleness/in_flight_versions_mean"], metrics["staleness/in_queue_versions_mean"]) == (0.5, 0.5)
    assert (metrics["staleness/in_flight_versions_max"], metrics["staleness/in_queue_versions_max"]) == (1, 1)
    assert (metrics["staleness/histogram_0"], metrics["staleness/histogram_2"]) == (1, 1)
    assert metrics["rollout/mixed_version_ratio"] == 0.5
    assert metrics["reward/zero_std_ratio"] == 0
    assert metrics["reward/term_match"] == 2


def test_every_batch_metric_is_declared():
    check_declared(batch_metrics([D10], trained_on=0))
    check_declared(batch_metrics([[failed("a")]], trained_on=0))


def test_failed_members_get_no_row():
    plan = plan_of([trajectory("a", 2, 0.0), failed("b"), trajectory("c", 2, 1.0)])
    assert [row.trajectory_id for row in plan.rows] == ["a", "c"]


def test_chains_of_a_trajectory_share_its_advantage_and_count_as_one_sequence():
    plan = plan_of(
        [trajectory("a", 2, 0.0, chains=2), trajectory("b", 3, 1.0)], options=GrpoOptions(aggregation="sequence_mean")
    )
    assert [(row.chain, row.sequence_tokens) for row in plan.rows] == [(0, 4), (1, 4), (0, 3)]
    assert plan.rows[0].advantage == plan.rows[1].advantage
    assert plan.mini_batches[0].denominator == 2


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_an_undefined_rollout_logprob_at_a_trained_token_skips_the_step_by_name(logprob):
    plan = plan_of([trajectory("good", 2), trajectory("bad", 2, 1.0, logprob=logprob)])
    assert "trajectory bad has rollout log-prob" in plan.skipped
    assert plan.mini_batches == ()


class NumpyAdvantages(PolicyGradient):
    """A user's algorithm that works in numpy."""

    def advantages(self, groups):
        return {name: np.float32(value) for name, value in super().advantages(groups).items()}


def test_an_algorithms_numbers_may_be_numpys():
    settings = {"mini_batches": 1, "max_tokens": 64, "num_ranks": 1, "layout": Layout.SHARED}
    plan = plan_step([D10], NumpyAdvantages(GrpoOptions(std="none")), **settings)
    assert StepPlan.decode(plan.encode()) == plan
    assert [row.advantage for row in plan.rows] == [-0.5, 0.5, -0.5, 0.5]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rewards_without_a_mean_skip_the_step_by_name():
    plan = plan_of([trajectory("a", 2, 1.7e308), trajectory("b", 2, -1.7e308), trajectory("c", 2, 1.7e308)])
    assert plan.skipped == "trajectory b has advantage nan"
    assert StepPlan.decode(plan.encode()) == plan


def test_prompts_are_shared_within_a_group_only():
    plan = plan_of([trajectory("a", 2), trajectory("b", 2)], [trajectory("c", 2, group="h")])
    assert plan.rows[0].prompt == plan.rows[1].prompt != plan.rows[2].prompt


def test_mini_batches_and_ranks_cover_every_row_once_and_survive_json():
    groups = [[trajectory(f"{g}-{m}", 2 + m, float(m), group=str(g)) for m in range(3)] for g in range(4)]
    plan = plan_of(*groups, mini_batches=3, num_ranks=2)
    assert [part.num_tokens for part in plan.mini_batches] == [18, 9, 9]
    indices = [index for part in plan.mini_batches for index in chain(*chain(*part.ranks))]
    assert sorted(indices) == list(range(12))
    assert plan.rows_of(0) | plan.rows_of(1) == set(range(12))
    assert plan.rows_of(0) & plan.rows_of(1) == set()
    assert StepPlan.decode(plan.encode()) == plan
    rows = build_rows(plan.rows, [member for group in groups for member in group], oldest_trained=0)
    assert [row.shape.name for row in rows] == [row.trajectory_id for row in plan.rows]
