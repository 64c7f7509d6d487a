"""A live run gets more workers, then fewer; nothing is lost."""

import subprocess
import sys

import pytest
from test_emulated_run import EMULATED

pytestmark = pytest.mark.e2e


def test_a_live_run_is_scaled_up_and_down_and_goes_on(start):
    run = start(*EMULATED, "run.max_steps=40", "rollout.num_workers=1", "rollout.weight_update=in_flight")
    run.wait_for_step(2)

    def scale(change):
        command = [sys.executable, "-m", "laminar.cli.main", "scale", str(run.folder.path), "--rollouts", change]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "2 rollout workers" in scale("+1")
    run.wait_until(lambda: "rollout-1" in run.folder.read_state().roles, "a second worker", 90)
    assert "1 rollout workers" in scale("-1")
    run.wait_until(lambda: "scaled to 1 rollout workers" in run.text(), "its end", 90)
    assert run.wait(150) == 0, run.text()
    last = run.lines()[-1]
    assert last["step"] == 40
    assert last["experience/failed"] == 0
    assert run.leftovers() == []
