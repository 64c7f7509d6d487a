"""A run that is operated: watched through its dashboard, paused, tuned and stopped from outside."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import defaultdict

import pytest

from laminar.dashboard.address import bind
from laminar.telemetry.timeline import read_timeline

pytestmark = pytest.mark.e2e


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "laminar.cli.main", *map(str, arguments)], capture_output=True, text=True, timeout=90
    )


def get(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def accounted(timeline):
    """By role: wall time of its spans, the time they cover, and what its clock's states sum to at the same moment."""
    spans = defaultdict(list)
    results = {}
    for line in timeline:
        if line["kind"] == "spans":
            spans[line["role"]] += line["spans"]
            continue
        for role, metrics in line["roles"].items():
            if not spans[role]:
                continue
            wall = spans[role][-1][2] - spans[role][0][1]
            covered = sum(end - start for _, start, end in spans[role])
            total = sum(value for name, value in metrics.items() if name.startswith("time/state_"))
            results[role] = (wall, covered, total)
    return results


def test_a_run_is_watched_paused_tuned_and_stopped_from_outside(start):
    run = start(
        "run.max_steps=5000", "rollout.num_workers=2", "dashboard.enabled=true", "dashboard.port=0",
        "staleness.max_staleness=2",
        "metrics.trajectory_rate=1.0", "eval.path=", "trainer.algorithm.options.filter_zero_variance=false",
    )  # fmt: skip
    run.wait_for_step(3)
    folder = run.folder.path
    url = run.folder.read_state().dashboard_url

    assert run.open_ports() == []
    roles = {"trainer-0", "rollout-0", "rollout-1", "relay-0"}
    # The first steps may be one worker's alone.
    run.wait_until(lambda: roles <= set(json.loads(get(f"{url}/api/state"))["roles"]), "every role to be heard of", 90)
    assert json.loads(get(f"{url}/api/state"))["run"]["is_alive"]
    assert "laminar_train_loss{" in get(f"{url}/metrics")

    assert command("pause", folder).returncode == 0
    status = json.loads(command("status", folder, "--json").stdout)
    assert (status["rollouts"], status["limited_by"][:20]) == ("paused", "Rollouts are paused:")
    assert roles <= set(status["roles"])
    assert status["trajectories"]["trained"] >= 3 * 8 * 8
    assert command("unpause", folder).returncode == 0
    assert command("set", folder, "staleness.max_staleness=3").returncode == 0
    refused = command("set", folder, "trainer.learning_rate=1")
    assert (refused.returncode, "only staleness.max_staleness" in refused.stderr) == (2, True)
    step = run.lines()[-1]["step"]
    run.wait_for_step(step + 5)
    assert json.loads(get(f"{url}/api/trajectories?outcome=trained&limit=1"))["num_found"] > 0

    stopped = command("stop", folder)
    assert (stopped.returncode, run.wait(60)) == (0, 130)
    assert run.leftovers() == []
    assert command("stop", folder).returncode == 5

    assert max(line["staleness/versions_max"] for line in run.lines()) <= 3
    texts = " ".join(line["text"] for line in run.lines("mark"))
    assert "staleness.max_staleness: 2 -> 3" in texts
    assert (folder / "report.html").stat().st_size > 10_000
    times = accounted(read_timeline(run.folder.timeline))
    assert roles <= set(times)
    for role, (wall, covered, total) in times.items():
        assert covered == pytest.approx(wall, rel=0.02), role
        assert total == pytest.approx(wall, rel=0.02), role


@pytest.mark.slow
def test_a_run_in_which_nothing_moves_is_diagnosed_saved_and_stopped(start):
    run = start("run.max_steps=5000", "run.no_progress_seconds=90", "rollout.max_failure_ratio=1.0", "eval.path=")
    run.wait_for_step(3, seconds=300)
    for pid in run.engine_pids():
        os.kill(pid, signal.SIGSTOP)  # answers nothing, and is not dead
    os.kill(run.role_pid("rollout-0"), signal.SIGSTOP)
    assert run.wait(300) == 4, run.text()
    assert "no step ended for 90 s" in run.text()
    assert "a checkpoint was saved" in run.text()
    (diagnosis,) = run.folder.logs.glob("diagnosis-*.txt")
    assert "trainer-0: " in diagnosis.read_text()
    assert run.leftovers() == []
    last = run.lines()[-1]["step"]
    assert (run.folder.checkpoints / f"step_{last}").is_dir() or any(
        str(last) in p.name for p in run.folder.checkpoints.iterdir()
    )


@pytest.mark.slow
def test_a_killed_supervisor_takes_its_dashboard_along_and_frees_the_port(start):
    run = start("run.max_steps=5000", "dashboard.enabled=true", "dashboard.port=0", "eval.path=")
    run.wait_for_step(2, seconds=300)
    port = int(run.folder.read_state().dashboard_url.rpartition(":")[2])
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    run.wait_until_gone(30)
    bind("127.0.0.1", port).close()
