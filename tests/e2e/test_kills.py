"""Any process may be killed at any moment: the run goes on, or everything is gone within 30 s (case D26)."""

import os
import signal

import pytest

pytestmark = pytest.mark.e2e

STEADY = ("trainer.algorithm.options.filter_zero_variance=false", "checkpoint.every_steps=5", "rollout.lease_seconds=4")


def test_killed_engine_worker_and_trainer_are_restarted_and_the_run_ends(start):
    run = start("run.max_steps=40", *STEADY)
    run.wait_for_step(6)
    (engine,) = run.engine_pids()
    os.kill(engine, signal.SIGKILL)
    run.wait_for_step(run.lines()[-1]["step"] + 4)
    worker = run.role_pid("rollout-0")
    os.kill(worker, signal.SIGKILL)
    run.wait_until(lambda: run.role_pid("rollout-0") != worker, "another worker", 60.0)
    run.wait_for_step(run.lines()[-1]["step"] + 4)
    trainer = run.role_pid("trainer-0")
    os.kill(trainer, signal.SIGKILL)
    run.wait_until(lambda: run.role_pid("trainer-0") != trainer, "another trainer", 60.0)
    assert run.wait(240) == 0, run.text()
    steps = run.lines()
    assert [line["step"] for line in steps] == list(range(1, 41))  # one point a step, also for steps trained twice
    assert max(line["staleness/versions_max"] for line in steps) <= 1
    assert run.leftovers() == []


def test_ctrl_c_saves_a_checkpoint_ends_everything_and_resume_finishes(start):
    run = start("run.max_steps=25", *STEADY)
    run.wait_for_step(7)
    os.killpg(run.process.pid, signal.SIGINT)  # a terminal signals the whole foreground group
    assert run.wait(30) == 130, run.text()
    run.wait_until_gone(1)
    stopped_at = run.lines()[-1]["step"]
    assert (run.folder.checkpoints / f"step_{stopped_at:06d}").is_dir()
    resumed = start(resume=run.folder.path)
    assert resumed.wait(240) == 0, resumed.text()
    assert [line["step"] for line in resumed.lines()] == list(range(1, 26))


def test_a_killed_supervisor_leaves_nothing_after_30_seconds_and_its_run_resumes(start):
    run = start("run.max_steps=14", *STEADY)
    run.wait_for_step(6)
    run.process.kill()
    run.process.wait()
    run.wait_until_gone(30)
    resumed = start(resume=run.folder.path)
    assert resumed.wait(240) == 0, resumed.text()
    assert [line["step"] for line in resumed.lines()] == list(range(1, 15))


def test_sigterm_ends_everything_in_order(start):
    run = start("run.max_steps=1000", *STEADY)
    run.wait_for_step(2)
    run.process.terminate()
    assert run.wait(30) == 130, run.text()
    run.wait_until_gone(1)
    assert "***" not in run.text()  # no stack dump of Ray's


def test_two_runs_started_together_on_one_host_never_meet(start, tmp_path_factory):
    settings = ("run.max_steps=3", "staleness.max_staleness=0", *STEADY)
    first = start(*settings)
    second = start(*settings, directory=tmp_path_factory.mktemp("second"))
    for run in (first, second):
        assert run.wait(240) == 0, run.text()
        assert run.leftovers() == []
    assert first.folder.path.name != second.folder.path.name
    assert [line["batch"] for line in first.lines()] == [line["batch"] for line in second.lines()]
