"""Which alerts are news; and what an observer judges them by."""

from laminar.dashboard.alerts import Alert, find_alerts
from laminar.telemetry.alert_watch import AlertWatch, Hearing
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
    hearing = Hearing()
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
