"""Which alerts are news; and what an observer judges them by."""

import pytest

from laminar.config.root import LaminarConfig
from laminar.dashboard.alerts import Alert, find_alerts
from laminar.run_folder import RunFolder
from laminar.telemetry.alert_watch import AlertWatch, Hearing
from laminar.telemetry.observe import AlertSink, open_sinks
from laminar.telemetry.stream import Event

A, B = Alert("critical", "role_silent", "a is silent", "a"), Alert("critical", "role_silent", "b is silent", "b")


def test_an_alert_is_news_once_and_again_when_it_lasts_or_comes_back():
    watch = AlertWatch(repeat_seconds=100.0)
    assert watch.news([A], 0.0) == [A]
    assert watch.news([A, B], 50.0) == [B]
    assert watch.news([A, B], 100.0) == [A]  # a lasts
    assert watch.news([B], 149.0) == []
    assert watch.news([A, B], 155.0) == [B]  # a was away for a moment only; b lasts
    assert watch.news([], 300.0) == []
    assert watch.news([A], 301.0) == [A]


def names(hearing, now, is_alive=True):
    return [(alert.name, alert.subject) for alert in find_alerts(hearing.facts(now, 0.5, is_alive=is_alive))]


def heard(*events):
    hearing = Hearing(mismatch_alarm=0.05)
    for role, kind, at, fields in events:
        hearing.note(Event(role, kind, at, {}, fields), at)
    return hearing


def test_a_role_that_stops_speaking_is_missed_and_one_that_retired_is_not():
    told = [("rollout-0", "worker", 0.0, {}), ("rollout-1", "worker", 0.0, {})]
    assert names(heard(*told), 6.0) == [("role_silent", "rollout-0"), ("role_silent", "rollout-1")]
    assert names(heard(*told, ("supervisor", "retired", 1.0, {"role": "rollout-1"})), 6.0) == [("role_silent", "rollout-0")]
    assert names(heard(*told), 6.0, is_alive=False) == []


def test_no_step_for_long_is_an_alert_unless_rollouts_are_paused():
    step = ("trainer-0", "step", 0.0, {})
    hearing = heard(step)
    hearing.note_line({"kind": "step", "step": 1, "time/step_seconds": 2.0, "time": 0.0})
    assert names(hearing, 61.0) == [("no_progress", "")]
    hearing.note(Event("supervisor", "control", 2.0, {}, {"verb": "pause"}), 2.0)
    assert names(hearing, 61.0) == []


def test_what_is_counted_since_the_start_is_judged_by_its_growth():
    hearing = heard()
    for failed, admitted in ((90.0, 100.0), (91.0, 200.0)):
        hearing.note_line({"kind": "step", "step": 1, "experience/failed": failed, "experience/admitted": admitted})
    assert names(hearing, 0.0) == []


def config(**sections):
    return LaminarConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


class Outbox:
    def __init__(self):
        self.posted = []

    def post(self, alert):
        self.posted.append((alert.level, alert.name, alert.text))


def test_what_the_supervisor_calls_an_alert_goes_out_at_once(tmp_path):
    outbox = Outbox()
    sink = AlertSink(config(), RunFolder.create(tmp_path, "a"), outbox)
    sink.add_event(Event("rollout-0", "notice", 0.0, {}, {"text": "engine restarted"}))
    sink.add_event(Event("supervisor", "alert", 0.0, {}, {"name": "run_failed", "text": "the run gave up: no room"}))
    assert outbox.posted == [("critical", "run_failed", "the run gave up: no room")]


@pytest.mark.parametrize(("metrics", "names"), [({}, ["TraceSink"]), ({"trace": False}, [])])
def test_only_the_sinks_that_are_asked_for_are_opened(tmp_path, metrics, names):
    sinks = open_sinks(config(metrics=metrics), RunFolder.create(tmp_path, "a"), "run-1")
    assert [type(sink).__name__ for sink in sinks] == names
