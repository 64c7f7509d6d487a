"""Policy `mask`: over-age tokens leave numerator and denominator, their trajectory's reward stays (case D12's mask)."""

import numpy as np
import pytest

from laminar.policies.masking import newest_trained_number, num_over_age_tokens, oldest_trained_number, trained_mask
from laminar.types import (
    Chain,
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
from trainer.plan import build_rows, plan_step


def part(ids, logprobs, number, masked_head_tokens=0):
    return sampled(ids, logprobs, WeightVersion(0, number), masked_head_tokens)


D12 = Chain(
    (given([1, 2]), part([11, 12, 13], [-0.1, -0.2, -0.3], 3), part([14, 15], [-0.4, -0.5], 4), part([16], [-0.6], 6))
)
TOOL = Chain((given([1]), part([5], [-1.0], 2), given([7, 8]), part([6, 6], [-1.0, -2.0], 5)))


def trajectory(name, *chains, reward=0.0, group="g"):
    return Trajectory(
        name, group, "p", 0, 1, Purpose.TRAIN, SamplingParameters(1.0, 8, 0), chains, None, reward=reward,
        reward_terms={}, turns=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "mask"),
    [(0, [0, 0, 0, 0, 0, 1]), (1, [0, 0, 0, 0, 0, 1]), (2, [0, 0, 0, 1, 1, 1]), (3, [1] * 6), (None, [1] * 6)],
)
def test_tokens_older_than_the_inclusive_bound_are_masked_each_by_its_own_version(bound, mask):
    oldest = oldest_trained_number(6, bound)
    assert trained_mask(D12, oldest).tolist() == [False, False, *map(bool, mask)]
    assert num_over_age_tokens(trajectory("t", D12), oldest) == 6 - sum(mask)


def test_every_per_token_array_keeps_its_length_and_its_values():
    assert D12.rollout_logprobs()[2:] == pytest.approx(np.float32([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]))
    assert D12.version_numbers()[2:].tolist() == [3, 3, 3, 4, 4, 6]
    assert len(trained_mask(D12, 5)) == D12.num_tokens == 8


def test_given_tokens_between_versions_stay_untrained():
    assert trained_mask(TOOL, 0).tolist() == [False, True, False, False, True, True]
    assert trained_mask(TOOL, 3).tolist() == [False, False, False, False, True, True]


def test_a_masked_head_is_not_counted_as_over_age_and_cannot_keep_a_group():
    chain = Chain((given([1]), part([5, 5], [-1.0, -1.0], 2), part([6], [-1.0], 4, masked_head_tokens=1)))
    assert num_over_age_tokens(trajectory("t", chain), 3) == 2
    assert newest_trained_number([trajectory("t", chain)]) == 2
    assert newest_trained_number([trajectory("a", chain), trajectory("b", TOOL, chain)]) == 5


def test_a_resumed_run_may_lower_the_bound_to_zero_at_number_zero():
    assert oldest_trained_number(0, 0) == 0
    assert oldest_trained_number(3, 4) == 0


# ---- in the step's plan: trained on 6, K = 2; "old" has no token left, "mixed" three of six, "fresh" both chains

OLD, MIXED, FRESH = (
    trajectory("old", Chain((given([1]), part([5, 5, 5], [-1.0] * 3, 3))), reward=3.0),
    trajectory("mixed", D12, reward=0.0),
    trajectory("fresh", Chain((given([1]), part([5, 5], [-1.0] * 2, 6))), TOOL, reward=0.0),
)


def plan(aggregation="token_mean", oldest=4):
    algorithm = PolicyGradient(GrpoOptions(aggregation=aggregation, std="none"))
    return plan_step(
        [(OLD, MIXED, FRESH)], algorithm, mini_batches=1, max_tokens=64, num_ranks=1, layout=Layout.SHARED,
        oldest_trained=oldest,
    )  # fmt: skip


def test_masked_tokens_leave_the_denominator_and_a_fully_masked_member_leaves_the_rows():
    made = plan()
    assert [(row.trajectory_id, row.chain) for row in made.rows] == [("mixed", 0), ("fresh", 0), ("fresh", 1)]
    assert made.mini_batches[0].denominator == made.mini_batches[0].num_tokens == 3 + 2 + 2
    assert plan(oldest=0).mini_batches[0].denominator == 3 + 6 + 2 + 3


def test_the_reward_of_a_fully_masked_member_stays_in_its_groups_statistics():
    advantages = {row.trajectory_id: row.advantage for row in plan().rows}
    assert advantages == {"mixed": -1.0, "fresh": -1.0}  # the mean of 3, 0, 0 is 1; without "old" it would be 0


def test_sequence_aggregation_counts_only_sequences_with_a_token_left():
    assert plan("sequence_mean").mini_batches[0].denominator == 2
    assert [row.sequence_tokens for row in plan("sequence_mean").rows] == [3, 4, 4]


def test_rows_that_other_ranks_build_have_the_planned_masks():
    made = plan()
    rows = build_rows(made.rows, [OLD, MIXED, FRESH], made.oldest_trained)
    assert [int(row.mask.sum()) for row in rows] == [3, 2, 2]
    assert made.oldest_trained == type(made).decode(made.encode()).oldest_trained == 4


def test_a_batch_without_a_token_left_is_skipped_with_the_reason():
    assert plan(oldest=7).skipped == "the batch has no token to train"


def test_masked_tokens_are_a_metric():
    metrics = batch_metrics([(OLD, MIXED, FRESH)], trained_on=6, oldest_trained=4)
    assert metrics["staleness/masked_tokens"] == 3 + 3 + 1
    assert batch_metrics([(OLD, MIXED, FRESH)], trained_on=6)["staleness/masked_tokens"] == 0
