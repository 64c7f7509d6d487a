"""An observer that is stopped, killed or hangs slows nobody, and costs no line; a resume goes on with every curve."""

import json
import os
import re
import signal

import pytest

from laminar.json_lines import read_lines
from laminar.telemetry.registry import METRICS

pytestmark = pytest.mark.e2e

EMULATED = (
    "trainer.kind=emulated",
    "trainer.emulated.step_seconds=[0.1]",
    "rollout.engine.kind=emulated",
    "rollout.engine.options.length-scale=0.005",
    "rollout.engine.options.time-factor=4.0",
    "run.max_steps=100000",
    "checkpoint.every_steps=5",
    "staleness.max_staleness=2",
    "eval.path=",
    "metrics.trajectory_rate=1.0",
)
SO_FAR = [metric.name for metric in METRICS if metric.type == "counter" and "*" not in metric.name]


def printed_step(run):
    """The last step that the supervisor's own output tells of."""
    return max(map(int, re.findall(r"^step (\d+)/", run.text(), re.MULTILINE)), default=0)


def wait_for_printed_step(run, step, seconds=150):
    run.wait_until(lambda: printed_step(run) >= step, f"step {step} in the output", seconds)


def assert_whole(lines):
    """One line a step, and nothing that is counted so far ever falls."""
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for name in SO_FAR:
        values = [line[name] for line in lines if name in line]
        assert values == sorted(values), name
    times = [line["time"] for line in lines]
    assert times == sorted(times)


def test_steps_go_on_while_the_observer_is_stopped_or_killed_and_no_line_is_lost(start):
    run = start(*EMULATED)
    run.wait_for_step(2, seconds=300)
    first = run.role_pid("observer")
    os.kill(first, signal.SIGSTOP)
    written = run.lines()[-1]["step"]
    wait_for_printed_step(run, written + 8)
    assert run.lines()[-1]["step"] <= written + 1  # one may have been on its way
    os.kill(first, signal.SIGKILL)
    run.wait_for_step(written + 8)
    assert run.role_pid("observer") != first
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    assert_whole(run.lines())
    assert any("observer restarted: it ended with status -9" in line["text"] for line in run.lines("mark"))
    drawn = {event["name"] for event in json.loads((run.folder.path / "trace.json").read_text())}
    assert {"episode", "turn 0", "decode", "environment", "reward", "train", "publish", "pull", "swap"} <= drawn
    assert run.leftovers() == []


@pytest.mark.slow
def test_a_run_whose_observer_hangs_ends_in_time_with_all_its_lines_and_its_resume_goes_on_with_every_curve(start):
    settings = (*EMULATED, "metrics.tensorboard=true", "metrics.wandb=offline")
    run = start(*settings)
    run.wait_for_step(6, seconds=300)
    os.kill(run.role_pid("observer"), signal.SIGSTOP)
    wait_for_printed_step(run, printed_step(run) + 3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    assert run.leftovers() == []
    before = run.lines()
    assert before[-1]["step"] >= printed_step(run)
    resumed = start(resume=run.folder.path)
    resumed.wait_for_step(before[-1]["step"] + 5)
    resumed.process.send_signal(signal.SIGTERM)
    assert resumed.wait(60) == 130, resumed.text()
    lines = resumed.lines()
    assert lines[: len(before)] == before
    assert_whole(lines)
    assert max(line["staleness/versions_max"] for line in lines) <= 2
    assert_tensorboard_holds(run.folder.path / "tensorboard", read_lines(run.folder.metrics))
    assert len(list(run.folder.path.glob("wandb/offline-run-*"))) == 2
    assert resumed.leftovers() == []


def assert_tensorboard_holds(folder, lines):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    points = [(point.step, point.value) for point in read.Scalars("staleness/versions_mean")]
    steps = [line for line in lines if line["kind"] == "step"]
    assert points == [(line["step"], pytest.approx(line["staleness/versions_mean"])) for line in steps]
