"""Off-policy correction against hand-computed weights and an independent loop; and the diagnostics of what it corrects."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from laminar.config.trainer import CorrectionConfig
from laminar.telemetry.registry import check_declared
from trainer.correction import judge_sequences, row_sums, token_weights
from trainer.mismatch import UNJUDGED_STEPS, Mismatch, MismatchAlarm

LOG = math.log
DIFFERENCE = np.array([LOG(3), LOG(1.5), math.nan, LOG(0.25)])
MASK = np.array([True, True, False, True])
ALONE = SimpleNamespace(sum=list, sum_shares=list, gather_numbers=lambda number: [number])
"""What `Mismatch.metrics` asks of the ranks, with one of them."""


def weights(kind, **bounds):
    config = CorrectionConfig(weight=kind, **bounds)
    total = row_sums(DIFFERENCE, MASK)[0]
    return token_weights(DIFFERENCE, MASK, total, config).tolist()


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        ("none", {}, [1, 1, 1, 1]),
        ("token_tis", {"weight_max": 2.0}, [2, 1.5, 1, 0.25]),
        ("token_mis", {"weight_max": 2.0}, [0, 1.5, 1, 0.25]),
        ("icepop", {"weight_min": 0.5, "weight_max": 5.0}, [3, 1.5, 1, 0]),
        ("sequence_tis", {"weight_max": 1.0}, [1, 1, 1, 1]),
        ("sequence_tis", {"weight_max": 2.0}, [1.125, 1.125, 1, 1.125]),
        ("sequence_mis", {"weight_max": 1.0}, [0, 0, 1, 0]),
    ],
)
def test_weights_of_every_kind_by_hand(kind, bounds, expected):
    assert weights(kind, **bounds) == pytest.approx(expected, abs=1e-12)


def test_bounds_are_inclusive():
    config = CorrectionConfig(weight="icepop", weight_min=0.5, weight_max=2.0)
    differences = np.log([0.5, 2.0])
    differences[0] += 1e-15
    assert token_weights(differences, np.ones(2, bool), 0.0, config).tolist() == pytest.approx([0.5, 2.0])


def test_an_enormous_ratio_is_truncated_and_not_infinite():
    config = CorrectionConfig(weight="sequence_tis", weight_max=4.0)
    assert token_weights(np.array([900.0]), np.ones(1, bool), 900.0, config).tolist() == [4.0]


def verdicts(rows, names, **bounds):
    sums = np.array([row_sums(np.array(row, float), np.ones(len(row), bool)) for row in rows])
    return judge_sequences(sums, names, CorrectionConfig(**bounds))


ROWS, NAMES = [[0.1, 0.3], [0.5], [-0.4, -0.4], [0.0]], ["a", "b", "a", "c"]
"""Trajectory a has two rows: mean of d -0.1, b 0.5, c 0."""


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({}, [True, True, True, True]),
        ({"geometric_max": 1.5}, [True, False, True, True]),
        ({"geometric_min": 0.95}, [False, True, False, True]),
        ({"geometric_min": 0.9, "geometric_max": 1.7}, [True, True, True, True]),
        ({"max_k3": 0.06}, [True, False, True, True]),
        ({"max_k3": 0.01}, [False, False, False, True]),
    ],
)
def test_all_rows_of_a_trajectory_are_kept_or_dropped_together(bounds, kept):
    # mean k3 by hand: a (0.005171 + 0.049859 + 2 x 0.070320) / 4 = 0.048917, b 0.148721, c 0
    assert verdicts(ROWS, NAMES, **bounds).kept.tolist() == kept


def test_a_sequence_weight_runs_over_all_chains_of_a_trajectory():
    found = verdicts(ROWS, NAMES, weight="sequence_tis")
    np.testing.assert_allclose(found.log_weight, [-0.4, 0.5, -0.4, 0.0], atol=1e-12)


def test_undefined_values_at_masked_places_are_not_seen():
    assert row_sums(np.array([math.nan, 0.5, math.inf]), np.array([False, True, False])) == pytest.approx(
        (0.5, math.exp(0.5) - 1.5, 1)
    )


# ---- diagnostics


def measured(*parts):
    mismatch = Mismatch()
    for difference, staleness, applied in parts:
        mismatch.add(np.array(difference), np.array(staleness), None if applied is None else np.array(applied))
    return mismatch.metrics(ALONE)


def test_kl_is_k3_in_the_direction_rollout_to_trainer_and_split_by_staleness():
    metrics = measured(([0.5, -0.2, 0.0], [0, 1, 1], None))
    first, second = math.exp(0.5) - 1.5, math.exp(-0.2) - 0.8
    assert metrics["mismatch/kl"] == pytest.approx((first + second) / 3)
    assert metrics["mismatch/kl_staleness_0"] == pytest.approx(first)
    assert metrics["mismatch/kl_staleness_1"] == pytest.approx(second / 2)
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.7 / 3)
    assert metrics["mismatch/weight_max"] == pytest.approx(math.exp(0.5))
    check_declared(metrics)


def test_equal_logprobs_have_no_mismatch_and_a_whole_effective_sample():
    metrics = measured(([0.0] * 8, [0] * 8, None))
    assert metrics["mismatch/effective_sample_size_ratio"] == 1
    assert {metrics[f"mismatch/ratio_{name}"] for name in ("p01", "p50", "p99")} == {1.0}
    assert metrics["mismatch/masked_ratio"] == metrics["mismatch/kl"] == 0


def test_effective_sample_size_and_masked_share_are_of_the_weights_that_are_applied():
    metrics = measured(([0.0, 0.1], [0, 3], [1.0, 3.0]), ([5.0, 0.0], [3, 0], [0.0, 0.0]))
    assert metrics["mismatch/effective_sample_size_ratio"] == pytest.approx(16 / (4 * 10))
    assert metrics["mismatch/masked_ratio"] == 0.5
    assert (metrics["mismatch/masked_staleness_0"], metrics["mismatch/masked_staleness_3"]) == (0.5, 0.5)


def test_quantiles_are_those_of_numpy_within_a_bin():
    differences = np.random.default_rng(0).normal(0, 0.5, 10_000)
    metrics = measured((differences[:3000], np.zeros(3000), None), (differences[3000:], np.zeros(7000), None))
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        assert metrics[f"mismatch/ratio_{name}"] == pytest.approx(np.exp(np.quantile(differences, share)), rel=0.01)


def test_very_old_tokens_share_one_bucket_and_nothing_measured_gives_no_metric():
    assert "mismatch/kl_staleness_32" in measured(([0.1, 0.1], [32, 500], None))
    assert measured(([], [], None)) == {}


def test_the_alarm_judges_fresh_tokens_only():
    alarm = MismatchAlarm(0.05)
    assert alarm.judge({"mismatch/kl": 0.5, "mismatch/kl_staleness_0": 0.05, "mismatch/kl_staleness_1": 0.9}) is None
    said = alarm.judge({"mismatch/kl": 0.1, "mismatch/kl_staleness_0": 0.06})
    assert said is not None
    assert said.startswith("KL 0.06 between engine and trainer on tokens of the newest weights, above")


def test_an_alarm_that_long_has_no_fresh_tokens_says_once_that_it_cannot_judge():
    alarm, stale = MismatchAlarm(0.05), {"mismatch/kl": 0.5, "mismatch/kl_staleness_2": 0.5}
    fresh = {"mismatch/kl": 0.01, "mismatch/kl_staleness_0": 0.01}
    most = UNJUDGED_STEPS - 1
    steps = [*[stale] * most, fresh, *[stale] * most, {}, *[stale] * 50, fresh, *[stale] * 50]
    said = [(place, text) for place, step in enumerate(steps) if (text := alarm.judge(step))]
    ((place, text),) = said
    assert place == most + 1 + most + 1  # neither a fresh step between, nor a skipped one that compared nothing, counts
    assert "has nothing to judge" in text
