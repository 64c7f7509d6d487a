"""When an update stands out: limits by hand, and what a spike does to the scale."""

import math
import random

import pytest

from laminar.config.trainer import SpikesConfig
from trainer.spikes import SpikeDetector


def detector(values, **settings):
    made = SpikeDetector(SpikesConfig(**({"min_updates": 5, "factor": 10.0} | settings)))
    for value in values:
        made.add({"loss": value})
    return made


def test_the_limit_is_median_plus_factor_times_scaled_median_absolute_deviation():
    """Median 3, absolute deviations 2 1 0 1 2, their median 1: 3 + 10 x 1.4826."""
    assert detector([1.0, 2.0, 3.0, 4.0, 5.0]).limit("loss") == pytest.approx(17.826)


def test_figures_that_hardly_move_may_move_by_a_tenth_of_their_size_times_the_factor():
    assert detector([2.0] * 5).limit("loss") == pytest.approx(2.0 + 10 * 0.2)


def test_nothing_is_judged_before_enough_is_known_or_when_switched_off():
    assert detector([1.0] * 4).limit("loss") == math.inf
    assert detector([1.0] * 5).limit("KL") == math.inf
    assert detector([1.0] * 5, action="off").find({"loss": 1e9}) is None


def test_a_spike_is_found_by_name_and_neither_hides_the_next_nor_stays_one_for_ever():
    judge = detector([1.0, 1.1, 0.9, 1.0, 1.05], window_updates=9)
    spike = judge.find({"KL": 5.0, "loss": 40.0})
    assert (spike.name, spike.value, spike.median) == ("loss", 40.0, 1.0)
    assert str(spike) == "loss 40 is above 2 (median of the last updates 1)"
    judge.add({"loss": 40.0})
    assert judge.find({"loss": 40.0})
    for _ in range(5):
        judge.add({"loss": 40.0})
    assert judge.find({"loss": 40.0}) is None


def test_undefined_figures_are_left_to_the_other_net():
    judge = detector([1.0] * 5)
    assert judge.find({"loss": math.nan}) is None
    judge.add({"loss": math.nan})
    assert judge.find({"loss": 3.1})


def test_what_was_all_but_0_may_become_small_and_what_is_clipped_anyway_is_no_spike():
    judge = SpikeDetector(SpikesConfig(min_updates=5), max_grad_norm=1.0)
    for _ in range(5):
        judge.add({"KL": 1e-12, "loss": 1e-9, "gradient norm": 1e-3})
    assert judge.find({"KL": 0.01, "loss": 0.01, "gradient norm": 1.0}) is None
    assert judge.find({"gradient norm": 1.01}).name == "gradient norm"
    assert judge.find({"KL": 0.011}).name == "KL"


def test_a_checkpoint_goes_on_with_the_same_scale():
    judge, other = detector([1.0, 3.0, 2.0, 5.0, 4.0, 9.0]), detector([])
    other.load_state(judge.state())
    assert other.limit("loss") == judge.limit("loss")


def test_heavy_tailed_figures_without_spikes_give_no_alarm_by_default():
    """Ten runs of 500 updates whose figures are log-normal with sigma 0.5."""
    draw = random.Random(0)
    alarms = 0
    for _ in range(10):
        judge = SpikeDetector(SpikesConfig())
        for _ in range(500):
            figure = {"loss": math.exp(draw.gauss(0.0, 0.5))}
            alarms += judge.find(figure) is not None
            judge.add(figure)
    assert alarms == 0
