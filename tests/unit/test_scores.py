"""pass@k, mean@n and their intervals, against enumeration, textbook values and hand calculation."""

import itertools
import math
import statistics

import pytest

from laminar.scores import estimate, pass_at_k, powers_of_two, report_rewards


@pytest.mark.parametrize(("num_samples", "num_passed"), [(1, 0), (1, 1), (4, 1), (5, 2), (6, 6), (6, 0)])
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_sample(num_samples, num_passed):
    samples = [index < num_passed for index in range(num_samples)]
    for k in range(1, num_samples + 1):
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_not_the_biased_plug_in():
    """n = 10, c = 3, k = 5: 1 - C(7, 5) / C(10, 5) = 1 - 21/252; the plug-in 1 - 0.7^5 = 0.83193 is too low."""
    assert pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)


@pytest.mark.parametrize("arguments", [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_beyond_the_samples_is_refused(arguments):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(*arguments)


def test_an_interval_comes_from_the_spread_between_prompts():
    values = [0.25, 0.5, 0.5, 1.0, 0.0]
    found = estimate(values)
    error = statistics.stdev(values) / math.sqrt(5)
    assert found.value == pytest.approx(0.45)
    assert (found.low, found.high) == pytest.approx((0.45 - 1.959964 * error, 0.45 + 1.959964 * error), abs=1e-6)


def test_all_right_does_not_claim_certainty():
    """Wilson's interval for 20 of 20: z^2 / (n + z^2) = 0.1611 below 1; for 10 of 20: 0.2993 to 0.7007."""
    assert (estimate([1.0] * 20).low, estimate([1.0] * 20).high) == pytest.approx((0.838875, 1.0), abs=1e-6)
    half = estimate([1.0, 0.0] * 10)
    assert (half.low, half.high) == pytest.approx((0.2993, 0.7007), abs=1e-4)


def test_one_prompt_has_no_interval_and_none_no_mean():
    assert (estimate([0.3]).low, estimate([0.3]).high) == (None, None)
    with pytest.raises(ValueError, match="no prompts"):
        estimate([])


def test_a_report_weighs_prompts_alike_and_leaves_failed_samples_out():
    """Prompt b has one answered sample of four: its mean counts as much as a's, and it is in no pass@4."""
    rewards = {"a": [1.0, 0.0, 0.0, 1.0], "b": [1.0], "c": []}
    report = report_rewards(rewards, version_number=7, samples_per_prompt=4, num_failed=7, pass_reward=1.0)
    assert (report.num_prompts, report.num_samples, report.num_failed) == (2, 5, 7)
    assert report.mean.value == pytest.approx(0.75)
    assert report.pass_at[1].value == pytest.approx(0.75)
    assert (report.pass_at[4].value, report.pass_at[4].num_prompts) == (1.0, 1)
    assert report.metrics()["eval/pass_at_2"] == pytest.approx(1 - 1 / 6)
    assert "eval/accuracy_low" in report.metrics()


def test_rewards_pass_from_the_stated_reward_on():
    report = report_rewards({"a": [0.5], "b": [0.49]}, version_number=0, samples_per_prompt=1, num_failed=0, pass_reward=0.5)
    assert report.pass_at[1].value == 0.5


def test_k_runs_over_powers_of_two_and_the_number_of_samples():
    assert list(powers_of_two(1)) == [1]
    assert list(powers_of_two(8)) == [1, 2, 4, 8]
    assert list(powers_of_two(6)) == [1, 2, 4, 6]
