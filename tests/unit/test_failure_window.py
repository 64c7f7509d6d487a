"""Too many failures stop the run with the first one's text; many for one reason raise an alarm (case D21's last line)."""

from laminar.types import Failure, FailureKind
from rollout.failures import FailureWindow


def window(*outcomes, max_ratio=0.9):
    made = FailureWindow(max_ratio)
    for outcome in outcomes:
        made.note(outcome)
    return made


def verifier(number):
    return Failure(FailureKind.VERIFIER, f"judge {number} took longer than 5 s")


TOOL = Failure(FailureKind.TOOL, "the shell died")


def test_sixty_four_failures_of_one_kind_stop_the_run_and_are_no_zeros():
    sentence = window(*map(verifier, range(64))).excess()
    assert sentence.startswith(
        "64 of the last 64 trajectories failed (verifier 64), more than rollout.max_failure_ratio = 0.9"
    )
    assert sentence.endswith("the first: verifier: judge 0 took longer than 5 s")


def test_the_share_is_told_by_kind_and_taken_over_the_last_ones_only():
    made = window(*[None] * 100, *[TOOL] * 20, *map(verifier, range(44)), max_ratio=0.5)
    assert "64 of the last 64 trajectories failed (verifier 44, tool 20)" in made.excess()
    assert window(*[TOOL] * 50, *[None] * 64, max_ratio=0.1).excess() == ""


def test_a_share_at_the_ceiling_and_a_short_beginning_do_not_stop_a_run():
    assert window(*[TOOL] * 8, *[None] * 8, max_ratio=0.5).excess() == ""
    assert window(*[TOOL] * 9, *[None] * 7, max_ratio=0.5).excess() != ""
    assert window(*[TOOL] * 15, max_ratio=0.1).excess() == ""


def test_half_of_the_window_failing_for_one_reason_is_an_alarm_said_once_until_it_is_over():
    made = window(*[None] * 32, *map(verifier, range(32)))
    assert made.alarm() == "32 of the last 64 trajectories failed for one reason: verifier: judge # took longer than # s"
    assert made.alarm() == ""
    for outcome in [None] * 64:
        made.note(outcome)
    assert made.alarm() == ""
    for number in range(40):
        made.note(verifier(number))
    assert made.alarm() != ""


def test_many_failures_for_different_reasons_are_no_alarm():
    others = [Failure(FailureKind.ENVIRONMENT, text) for text in ("a", "b", "c", "d")] * 12
    assert window(*others, *[None] * 16).alarm() == ""
