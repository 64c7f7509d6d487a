"""State clocks sum to wall time; the timeline file is bounded."""

import pytest

from laminar.telemetry.clock import MAX_SPANS, StateClock
from laminar.telemetry.timeline import TimelineFile, old_file, read_timeline


class Now:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def now():
    return Now()


def test_states_sum_to_the_wall_time_since_the_clock_was_made(now):
    clock = StateClock("start", now)
    for state, seconds in [("wait", 4.0), ("train", 2.5), ("wait", 1.0), ("train", 0.25)]:
        now.seconds += 1.0
        clock.enter(state)
        now.seconds += seconds - 1.0
    totals, _ = clock.take()
    # start 1; wait 3 + 1, then 0 + 1; train 1.5 + 1, then -0.75: each state lasts until the next enter
    assert totals == {
        "time/state_start_seconds": 1.0, "time/state_wait_seconds": 5.0, "time/state_train_seconds": 1.75,
    }  # fmt: skip
    assert sum(totals.values()) == now.seconds - 100.0


def test_totals_go_on_and_spans_are_told_once(now):
    clock = StateClock("idle", now)
    now.seconds += 2
    first, spans = clock.take()
    now.seconds += 3
    second, later = clock.take()
    assert (first, second) == ({"time/state_idle_seconds": 2.0}, {"time/state_idle_seconds": 5.0})
    assert [(state, round(end - start, 6)) for state, start, end in spans + later] == [("idle", 2.0), ("idle", 3.0)]
    assert spans[0][2] == pytest.approx(later[0][1])


def test_very_many_changes_are_joined_in_the_drawing_but_not_in_the_totals(now):
    clock = StateClock("a", now)
    for _ in range(500):
        now.seconds += 0.01
        clock.enter("b")
        now.seconds += 0.02
        clock.enter("a")
    totals, spans = clock.take()
    assert len(spans) <= MAX_SPANS
    assert spans[-1][2] - spans[0][1] == pytest.approx(15.0)
    assert totals == pytest.approx({"time/state_a_seconds": 5.0, "time/state_b_seconds": 10.0})


def test_the_timeline_is_rotated_and_keeps_one_old_file(tmp_path):
    path = tmp_path / "timeline.jsonl"
    file = TimelineFile(path, max_bytes=500)
    for second in range(40):
        file.add_spans("trainer-0", [["train", float(second), second + 1.0]])
    assert path.stat().st_size <= 500
    assert old_file(path).stat().st_size <= 700
    lines = read_timeline(path)
    assert lines[-1]["spans"] == [["train", 39.0, 40.0]]
    starts = [line["spans"][0][1] for line in lines]
    assert starts == sorted(starts)


def test_the_roles_metrics_are_written_every_few_seconds_only(tmp_path):
    file = TimelineFile(tmp_path / "timeline.jsonl")
    for tenth in range(100):
        file.add_roles(1000.0 + tenth / 10, {"rollout-0": {"engine/running": tenth}})
    assert [line["time"] for line in read_timeline(tmp_path / "timeline.jsonl")] == [1000.0, 1005.0]
