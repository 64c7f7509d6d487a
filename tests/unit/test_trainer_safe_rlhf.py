"""Safe RLHF: the multiplier by hand, advantages as the paper combines them, and a constraint that holds in the end."""

import math
from dataclasses import replace

import numpy as np
import pytest

from laminar.errors import ConfigError
from laminar.types import Purpose
from trainer.algorithms.advantages import group_advantages
from trainer.algorithms.presets import SafeRlhfOptions
from trainer.algorithms.safe_rlhf import SafeRlhf, next_multiplier


@pytest.fixture
def make_group(trajectory_maker):
    def make(rewards, costs, group_id="g"):
        return tuple(
            replace(trajectory_maker.play(group_id, member, "0.0", reward=reward), reward_terms={"cost": cost})
            for member, (reward, cost) in enumerate(zip(rewards, costs, strict=True))
        )

    return make


def test_the_multiplier_moves_as_computed_by_hand():
    """ln 2 + 0.5 x 2 x (0.75 - 0.25) = 1.193147, so 3.297443; then ln 3.297443 + 0.5 x 3.297443 x (0 - 0.25) = 0.780967."""
    options = SafeRlhfOptions(cost_limit=0.25, multiplier_learning_rate=0.5)
    first = next_multiplier(2.0, 0.75, options)
    assert first == pytest.approx(3.297443, abs=1e-6)
    assert next_multiplier(first, 0.0, options) == pytest.approx(2.183582, abs=1e-6)
    assert next_multiplier(99.0, 1e6, options) == pytest.approx(100.0)
    assert next_multiplier(7.0, 3.0, SafeRlhfOptions(multiplier_learning_rate=0.0)) == pytest.approx(7.0)


def test_costs_far_below_their_limit_leave_a_multiplier_that_can_rise_again():
    """Costs in tokens: ln 1 - 0.1 x 7692 is far below what a float64 power of e can hold."""
    options = SafeRlhfOptions(cost_limit=8192, multiplier_learning_rate=0.1)
    low = next_multiplier(1.0, 500.0, options)
    assert low == pytest.approx(1e-3)
    assert next_multiplier(low, 50_000.0, options) == pytest.approx(1e-3 * math.exp(1e-4 * 41_808))
    algorithm = SafeRlhf(options)
    algorithm.load_state({"multiplier": 0.0})
    assert algorithm.multiplier == 1e-3


def test_a_greedy_answer_moves_no_multiplier_and_without_one_no_group_is_kept(make_group):
    algorithm = SafeRlhf(SafeRlhfOptions(baseline="greedy", cost_limit=0.0))
    first, second, last = make_group([1.0, 1.0, 1.0], [0.0, 4.0, 9.0])
    greedy = replace(last, purpose=Purpose.GREEDY_BASELINE)
    assert algorithm.observe([(first, second, greedy)])["reward/cost_mean"] == 2.0
    assert algorithm.keeps((first, second, greedy))
    assert not algorithm.keeps((first, second))


def test_an_answer_counts_its_reward_less_its_multiplied_cost(make_group):
    """l = 3: (2 - 3 x 1) / 4 = -0.25 and (0 - 3 x -1) / 4 = 0.75; less their mean 0.25: -0.5 and 0.5."""
    algorithm = SafeRlhf(SafeRlhfOptions(multiplier=3.0))
    group = make_group([2.0, 0.0], [1.0, -1.0])
    assert [algorithm.shaped_reward(t) for t in group] == [-0.25, 0.75]
    assert algorithm.advantages([group]) == {"g-000": -0.5, "g-001": 0.5}


def test_advantages_are_the_papers_combination_of_two():
    """(A_R - l A_C) / (1 + l), each relative to its group, in float64."""
    random, multiplier = np.random.default_rng(1), 0.7
    rewards, costs, groups = random.normal(size=12), random.normal(size=12), list("abcabcabcabc")
    relative = [group_advantages(values.tolist(), groups, std="none")[0] for values in (rewards, costs)]
    together = group_advantages(((rewards - multiplier * costs) / (1 + multiplier)).tolist(), groups, std="none")[0]
    np.testing.assert_allclose(together, (relative[0] - multiplier * relative[1]) / (1 + multiplier), atol=1e-12)


def test_a_batch_moves_the_multiplier_once_and_says_so(make_group):
    algorithm = SafeRlhf(SafeRlhfOptions(multiplier_learning_rate=0.1))
    metrics = algorithm.observe([make_group([1.0, 1.0], [1.0, 0.0]), make_group([0.0, 1.0], [1.0, 0.0], "h")])
    assert metrics == {"reward/cost_mean": 0.5, "train/lagrange_multiplier": pytest.approx(math.exp(0.05))}


def test_a_checkpoint_goes_on_with_its_multiplier_and_a_new_run_begins_anew(make_group):
    algorithm, options = SafeRlhf(SafeRlhfOptions()), SafeRlhfOptions()
    algorithm.observe([make_group([1.0, 0.0], [1.0, 1.0])])
    resumed = SafeRlhf(options)
    resumed.load_state(algorithm.state())
    assert resumed.multiplier == algorithm.multiplier > options.multiplier
    resumed.load_state({})
    assert resumed.multiplier == options.multiplier


def test_a_group_of_equal_rewards_is_kept_if_its_costs_differ(make_group):
    algorithm = SafeRlhf(SafeRlhfOptions())
    assert algorithm.keeps(make_group([1.0, 1.0], [0.0, 1.0]))
    assert not algorithm.keeps(make_group([1.0, 1.0], [1.0, 1.0]))


def test_a_missing_cost_is_an_error_that_names_the_terms(make_group):
    algorithm = SafeRlhf(SafeRlhfOptions(cost="harm"))
    with pytest.raises(ConfigError, match="cost is 'harm', but the reward terms are: cost"):
        algorithm.observe([make_group([1.0], [1.0])])


def test_dual_ascent_settles_where_the_mean_cost_is_the_limit():
    """One state, two actions: a (reward 1, cost 1) and b (0, 0), limit 0.3: the optimum takes a with chance 0.3."""
    options = SafeRlhfOptions(cost_limit=0.3, multiplier_learning_rate=0.05, multiplier=1.0)
    logit, multiplier, tail = 0.0, options.multiplier, []
    for step in range(6000):
        share = 1 / (1 + math.exp(-logit))
        logit += 0.05 * share * (1 - share) * (1 - multiplier) / (1 + multiplier)
        multiplier = next_multiplier(multiplier, share, options)
        tail += [share] if step >= 3000 else []
    assert np.mean(tail) == pytest.approx(0.3, abs=0.02)
