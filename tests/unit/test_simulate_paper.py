"""The paper's runs in the simulator: lengths beyond the last quantile, and how its figures are judged."""

import pytest

from benchmarks.simulate import judge_figure_11, one_step_floor, paper_value
from benchmarks.simulate_runs import LARGEST, POINTS, REPACKING, STALENESS, play, run_of, wanted_runs
from laminar.simulate.paper import paper_cluster, paper_system
from laminar.simulate.timings import load_lengths


def paper_figures():
    return {point: paper_value(point) for point in POINTS}


def test_beyond_the_last_quantile_lengths_grow_as_between_the_last_two():
    """Figure 17, 72B: 2,746 tokens at 99 %, 3,940 at 99.9 %, so 3,940 x 3,940 / 2,746 = 5,653 at 99.99 %."""
    assert load_lengths("72B_math").quantile(0.9999) == 5653


@pytest.mark.parametrize("name", ["7B_math", "32B_math", "7B_tool", "AIME"])
def test_no_answer_is_longer_than_the_papers_limit(name):
    assert load_lengths(name).quantile(1.0) == 16_384


def test_the_papers_own_figures_have_no_error():
    judged = judge_figure_11(paper_figures())
    assert (judged["median_error"], judged["wrong_order"], judged["speedups_hold"]) == (0.0, [], True)
    assert judged["speedups"]["7B"]["paper"] == pytest.approx(260185 / 47435, abs=0.005)


def test_a_pair_in_the_wrong_order_and_a_speed_up_that_is_off_are_told():
    """Ours on 256 GPUs at 0.6 of the paper's 260,185 falls below AReaL's 158,946 and to 3.29 times verl's."""
    judged = judge_figure_11(paper_figures() | {("7B", "laminar", 4): 0.6 * 260185})
    assert judged["wrong_order"] == ["7B 256 partial/laminar"]
    assert judged["speedups"]["7B"]["simulated"] == pytest.approx(3.29)
    assert not judged["speedups_hold"]


def test_the_72b_model_loses_its_share_of_bytes_between_phases():
    """145.4 GB where the 32B model has 65.6: 2.216 times as long."""
    large, small = (paper_cluster(model, 512, 512).transfers.switch_seconds for model in ("72B", "32B"))
    assert large / small == pytest.approx(145.4 / 65.6)


@pytest.mark.parametrize(("num_replicas", "answers"), [(4, 2048), (64, 768)])
def test_a_replica_of_ours_begins_its_share_of_a_batch_or_what_the_fit_says(num_replicas, answers):
    """8,192 answers over 4 replicas are 2,048."""
    ours = paper_system("laminar", num_replicas)
    assert (ours.max_staleness, ours.max_in_flight_groups * 16, ours.refills) == (None, answers, False)


@pytest.mark.parametrize(
    ("model", "lengths", "seconds", "milliseconds"),
    [
        ("7B", "7B_math", [760, 743, 730], 44.6),
        ("7B", "AIME", [310, 303, 298], 18.2),
        ("32B", "32B_math", [535, 445, 445], 27.2),
    ],
)
def test_with_figure_17s_lengths_the_papers_smallest_model_would_be_its_slowest(model, lengths, seconds, milliseconds):
    """8,192 answers of 5,531, 2,165 or 3,322 tokens and a prompt of 150; the longest of a batch has 16,384.

    At the largest scale: 46.5 M tokens / 63,690 tokens/s = 730 s, 19.0 M / 63,690 = 298 s, 28.4 M / 63,871 = 445 s.
    """
    floor = one_step_floor(model, lengths)
    assert floor["seconds_a_step"] == pytest.approx(seconds, rel=0.02)
    assert floor["longest_answer_tokens"] == pytest.approx(16_384, rel=0.01)
    assert floor["milliseconds_a_token"] == pytest.approx(milliseconds, rel=0.02)
    assert floor["tokens_per_second"] == {"7B": 63690, "32B": 63871}[model]


def test_the_7b_model_is_judged_with_figure_2s_lengths_and_the_others_with_figure_17s():
    lengths = {run_of((model, "laminar", 0)).lengths for model in ("7B", "32B", "72B")}
    assert lengths == {"AIME", "32B_math", "72B_math"}


def test_a_run_that_two_figures_need_is_played_once_and_long_enough_for_both():
    """75 points, 25 of the 7B model with figure 17's lengths, one without repack, one with a failure."""
    wanted = wanted_runs(quick=True)
    assert len(wanted) == 75 + 25 + 1 + 1
    assert (wanted[REPACKING], wanted[STALENESS], wanted[LARGEST]) == ((16, 4), (11, 3), (10, 3))
    assert wanted[run_of(("7B", "laminar", 2))] == (11, 3)
    assert wanted[run_of(("7B", "laminar", 1))] == (7, 3)


def test_a_lockstep_run_of_the_paper_tells_its_cpu_time():
    played = play(run_of(("7B", "synchronous", 0)), 2, 1)
    assert played.outcome.num_steps == 1
    assert 0 < played.cpu_seconds < 60
