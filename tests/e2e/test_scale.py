"""A live run gets more workers, then fewer; nothing is lost."""

import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EMULATED = (
    "trainer.kind=emulated",
    "trainer.emulated.step_seconds=[0.2]",
    "rollout.engine.kind=emulated",
    "rollout.engine.options.length-scale=0.005",
    "rollout.engine.options.time-factor=4.0",
    "staleness.max_staleness=2",
)


def test_a_live_run_is_scaled_up_and_down_and_goes_on(start):
    run = start(*EMULATED, "run.max_steps=200", "rollout.num_workers=1", "rollout.weight_update=trajectory")
    run.wait_for_step(2)

    def scale(change):
        command = [sys.executable, "-m", "laminar.cli.main", "scale", str(run.folder.path), "--rollouts", change]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "2 rollout workers" in scale("+1")
    run.wait_until(lambda: "rollout-1" in run.folder.read_state().roles, "a second worker", 90)
    run.wait_until(lambda: "manager" in run.folder.read_state().roles, "the manager that comes with it", 90)
    assert "1 rollout workers" in scale("-1")
    run.wait_until(lambda: "scaled to 1 rollout workers" in run.text(), "its end", 90)
    assert "rollout-1" not in run.folder.read_state().roles
    assert run.folder.read_state().wanted_workers == 1
    step = run.lines()[-1]["step"]
    run.wait_for_step(step + 3, 60)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    assert run.lines()[-1]["experience/failed"] == 0
    assert run.leftovers() == []
