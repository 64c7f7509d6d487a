"""Case D03 and D18d: group-relative advantages."""

import numpy as np
import pytest
from pydantic import ValidationError

from trainer.algorithms.advantages import group_advantages, is_informative
from trainer.algorithms.options import GrpoOptions

GROUPS = ["A", "B", "C", "D", "A", "B", "C", "A", "B"]
REWARDS = [1, 5, 7, 3, 2, 5, 9, 4, 5]
D03 = {
    "none": {"A": [-1.333333, -0.333333, 1.666667], "B": [0, 0, 0], "C": [-1, 1], "D": [0]},
    "population": {"A": [-1.069045, -0.267261, 1.336306], "B": [0, 0, 0], "C": [-1, 1], "D": [0]},
    "sample": {"A": [-0.872872, -0.218218, 1.091089], "B": [0, 0, 0], "C": [-0.707107, 0.707107], "D": [0]},
}


@pytest.mark.parametrize("std", ["none", "population", "sample"])
def test_interleaved_uneven_groups_are_normalised_by_id_in_input_order(std):
    values, good = group_advantages(REWARDS, GROUPS, std=std, std_epsilon=0.0)
    expected = {group: iter(column) for group, column in D03[std].items()}
    np.testing.assert_allclose(values, [next(expected[group]) for group in GROUPS], atol=1e-6)
    assert good.all()


@pytest.mark.parametrize(
    ("std", "expected"), [("none", [-1.5, 0, 1.5]), ("population", [-1, 0, 1]), ("sample", [-0.707107, 0, 0.707107])]
)
def test_a_failed_member_stays_out_of_the_statistics_and_is_masked(std, expected):
    values, good = group_advantages([1, None, 4], ["A"] * 3, std=std, std_epsilon=0.0)
    np.testing.assert_allclose(values, expected, atol=1e-6)
    assert good.tolist() == [True, False, True]


def test_a_group_that_failed_as_a_whole_gives_zeros_not_nan():
    values, good = group_advantages([None, None], ["A", "A"])
    assert values.tolist() == [0, 0]
    assert not good.any()


def test_epsilon_is_added_to_the_divisor():
    values, _ = group_advantages([0.0, 2.0], ["A", "A"], std="population", std_epsilon=1.0)
    np.testing.assert_allclose(values, [-0.5, 0.5])


def test_large_nearly_equal_rewards_keep_their_difference():
    values, _ = group_advantages([1e8, 1e8 + 1], ["A", "A"], std="population", std_epsilon=0.0)
    np.testing.assert_allclose(values, [-1, 1])


def test_rewards_equal_up_to_rounding_are_uninformative_and_give_zero():
    rewards = [0.1 + 0.2, 0.3]
    assert rewards[0] != rewards[1]
    assert not is_informative(rewards)
    assert group_advantages(rewards, ["A", "A"], std_epsilon=0.0)[0].tolist() == [0, 0]


def test_failed_members_do_not_make_a_group_informative():
    assert not is_informative([1.0, None])
    assert not is_informative([None, None])
    assert is_informative([1.0, None, 0.0])


def test_fixed_denominator_needs_its_tokens_and_nothing_else_takes_them():
    with pytest.raises(ValidationError, match="fixed_tokens"):
        GrpoOptions(aggregation="fixed_denominator")
    with pytest.raises(ValidationError, match="fixed_tokens"):
        GrpoOptions(fixed_tokens=8)
    assert GrpoOptions(aggregation="fixed_denominator", fixed_tokens=8).fixed_tokens == 8
