"""The diagnosis of a run in which nothing moves: names who waits for what."""

import signal
import subprocess
import sys

import pytest

from laminar.cluster.diagnosis import describe, last_errors, stack_of
from laminar.experience.answers import Counters, Snapshot
from laminar.telemetry.stream import Event
from laminar.telemetry.view import RunView
from laminar.types import GroupHeader, GroupState, WeightVersion


def view():
    known = RunView(max_steps=10)
    known.apply(Event("trainer-0", "waiting", 1.0, {}, {"text": "2 groups that must be trained now: 00000004"}))
    known.apply(Event("trainer-0", "clock", 1.0, {"time/state_wait_seconds": 90.0, "time/state_train_seconds": 10.0}, {}))
    known.apply(Event("rollout-0", "notice", 1.0, {}, {"text": "engine restarted: it hangs"}))
    return known


def snapshot():
    headers = [
        GroupHeader("00000004", 4, GroupState.IN_FLIGHT, 2, 2, 1, owner="rollout-0"),
        GroupHeader("00000003", 3, GroupState.READY, 2, 2, 1),
    ]
    counters = Counters(refused_claims={"staleness": 5}, failed={"tool": 2})
    return Snapshot(WeightVersion(1, 3), True, 1, tuple(headers), False, counters, 0, 77, {})


def test_it_names_the_wait_the_roles_states_the_groups_the_errors_and_the_stacks():
    text = describe(
        view(), snapshot(), ["rollout-0: ERROR boom"], {"trainer-0": "frame 1\nframe 2", "rollout-0": ""}, 60.0, 96.0
    )
    for words in (
        "No step ended for 60 s",
        "The trainer waits for: 2 groups that must be trained now: 00000004",
        "trainer-0: wait (90 of 100 s); SILENT for 95 s",
        "Published 1.3; 1 groups in_flight, 1 groups ready, 0 groups taken; 77 bytes reserved; admitting.",
        "00000004: owner rollout-0, oldest version 2",
        "{'staleness': 5}",
        "{'tool': 2}",
        "engine restarted: it hangs",
        "rollout-0: ERROR boom",
        "  frame 2",
        "not to be seen (py-spy is not installed",
    ):
        assert words in text


def test_a_data_module_that_does_not_answer_is_a_finding():
    assert "The data module does not answer." in describe(RunView(max_steps=1), None, [], {}, 60.0, 0.0)


def test_a_role_that_reports_is_not_called_silent():
    text = describe(view(), None, [], {}, 60.0, 3.0)
    assert "trainer-0: wait (90 of 100 s)\n" in text


def test_the_stack_of_a_stopped_process_is_seen_too():
    code = "import time\ndef wait_here():\n    print(flush=True)\n    time.sleep(60)\nwait_here()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        running = stack_of(process.pid)
        process.send_signal(signal.SIGSTOP)
        stopped = stack_of(process.pid)
        process.kill()
    if not running:
        pytest.skip("py-spy is not here, or this machine does not let it look")
    assert "wait_here" in stopped


def test_the_last_serious_lines_of_all_logs_come_in_order(tmp_path):
    (tmp_path / "a.log").write_text("2026-01-01 10:00:02,000 ERROR x: late\n2026-01-01 10:00:03,000 INFO x: fine\n")
    (tmp_path / "b.log").write_text("2026-01-01 10:00:01,000 WARNING y: early\n")
    assert last_errors(tmp_path) == [
        "b: 2026-01-01 10:00:01,000 WARNING y: early",
        "a: 2026-01-01 10:00:02,000 ERROR x: late",
    ]
