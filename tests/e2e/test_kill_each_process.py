"""Every process of the system is killed, one after another, in one run: it goes on, and leaves nothing (case D26)."""

import os
import signal
from pathlib import Path

import pytest

from laminar.cluster.processes import marked_processes
from laminar.dashboard.address import bind

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EMULATED = (
    "trainer.kind=emulated",
    "trainer.emulated.step_seconds=[0.2]",
    "rollout.engine.kind=emulated",
    "rollout.engine.options.length-scale=0.005",
    "rollout.engine.options.time-factor=4.0",
    "rollout.num_workers=2",
    "rollout.weight_update=trajectory",
    "rollout.lease_seconds=4",
    "staleness.max_staleness=2",
    "checkpoint.every_steps=5",
    "run.max_steps=100000",
    "eval.path=",
    "dashboard.enabled=true",
    "dashboard.port=0",
)


def with_words(*words):
    """Processes whose command line has all these words."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if all(word.encode() in line for word in words):
                found.append(int(entry))
    return found


def test_a_run_survives_the_death_of_each_of_its_processes_and_frees_everything_at_its_end(start):
    run = start(*EMULATED)
    run.wait_for_step(3, seconds=300)
    name = run.folder.path.name
    port = int(run.folder.read_state().dashboard_url.rpartition(":")[2])
    engines = [pid for pid in with_words("rollout.engines.emulated_server") if pid in marked_processes(name)]
    assert len(engines) == 2
    roles = ("observer", "manager", "relay-0", "rollout-0", "trainer-0", "dashboard")
    assert set(roles) <= set(run.folder.read_state().roles)
    victims = {
        "engine": lambda: engines[0],
        "the data module's guard": lambda: with_words("lifeline.py", str(run.folder.redis))[0],
        "sentinel": lambda: with_words("laminar.cluster.sentinel", name)[0],
        **{role: (lambda role=role: run.role_pid(role)) for role in roles},
    }
    for victim, find in victims.items():
        pid = find()
        os.kill(pid, signal.SIGKILL)
        step = run.lines()[-1]["step"]
        run.wait_until(lambda at=step: run.lines()[-1]["step"] >= at + 3, f"steps after the death of {victim}", 120)
    run.wait_until(lambda: with_words("laminar.cluster.sentinel", name), "a new sentinel", 30)
    run.process.kill()
    run.process.wait()
    run.wait_until_gone(30)
    bind("127.0.0.1", port).close()
    steps = [line["step"] for line in run.lines()]
    assert steps == list(range(1, steps[-1] + 1))
    resumed = start("run.max_steps=1", resume=run.folder.path)  # the last checkpoint loads
    assert resumed.wait(120) == 0, resumed.text()
    assert resumed.leftovers() == []
