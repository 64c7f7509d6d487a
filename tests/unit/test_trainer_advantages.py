"""Case D03 and D18d: group-relative advantages."""

import numpy as np
import pytest
from pydantic import ValidationError

from trainer.algorithms.advantages import group_advantages, is_informative, overlong_penalty, returns_to_go
from trainer.algorithms.presets import GrpoOptions

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


def test_nearly_equal_float32_rewards_are_normalised_as_in_exact_arithmetic():
    rewards = np.float32(1000) + np.arange(4, dtype=np.float32) * np.float32(2**-14)  # neighbours in float32
    values, _ = group_advantages(rewards.tolist(), ["A"] * 4, std="sample", std_epsilon=0.0)
    np.testing.assert_allclose(values.astype(np.float32), np.float32([-1.161895, -0.387298, 0.387298, 1.161895]), rtol=1e-6)


def test_leave_one_out_compares_with_the_mean_of_the_others_and_a_lone_member_gets_zero():
    rewards, groups = [1.0, 2.0, 6.0, 3.0, None], ["A", "A", "A", "B", "A"]
    values, good = group_advantages(rewards, groups, baseline="leave_one_out", std="none")
    np.testing.assert_allclose(values, [1 - 4, 2 - 3.5, 6 - 1.5, 0, 0], atol=1e-12)
    assert good.tolist() == [True, True, True, True, False]


def test_without_a_baseline_the_advantage_is_the_reward():
    values, good = group_advantages([5.0, None, 5.0], ["A"] * 3, baseline="none", std="none")
    assert values.tolist() == [5, 0, 5]
    assert good.tolist() == [True, False, True]


@pytest.mark.parametrize(("num_tokens", "expected"), [(16384, 0), (16383, 0), (18432, -0.5), (20480, -1), (20481, -1)])
def test_the_overlong_penalty_falls_linearly_over_the_buffer_as_in_dapo(num_tokens, expected):
    assert overlong_penalty(num_tokens, 20480, 4096, 1.0) == expected
    assert overlong_penalty(num_tokens, 20480, 0, 1.0) == 0


# ---- case D11: rewards 0.5 at place 1, 1.0 at place 6; tool output in the middle, padding at the end

D11_MASK = np.array([1, 1, 0, 0, 1, 0, 1, 0, 0], bool)
D11_RETURNS = {1.0: [1.5, 1.5, 1.0, 1.0], 0.9: [1.179, 1.31, 0.9, 1.0]}


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("masked", [0.0, 100.0, np.nan])
def test_returns_pass_through_given_tokens_whatever_stands_there(gamma, masked):
    rewards = np.where(D11_MASK, 0.0, masked)
    rewards[[1, 6]] = 0.5, 1.0
    returns = returns_to_go(rewards, D11_MASK, gamma)
    np.testing.assert_allclose(returns[D11_MASK], D11_RETURNS[gamma], atol=1e-12)
    assert (returns[~D11_MASK] == 0).all()


@pytest.mark.parametrize("gap", [0, 1, 5])
def test_inserting_given_tokens_changes_no_return(gap):
    mask = np.array([True, True] + [False] * gap + [True, True])
    rewards = np.array([0, 0.5] + [7.0] * gap + [0, 1.0])
    np.testing.assert_allclose(returns_to_go(rewards, mask, 0.9)[mask], D11_RETURNS[0.9], atol=1e-12)


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
