"""Whole runs without a model: emulated engines and an emulated trainer, everything else real."""

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


def test_emulated_workers_and_trainer_run_to_the_end_within_the_bound_and_leave_nothing_behind(start):
    run = start(
        *EMULATED, "run.max_steps=8", "rollout.num_workers=3", "rollout.weight_update=trajectory",
        "rollout.repack.interval_seconds=0.5", "rollout.repack.headroom_tokens=4",
    )  # fmt: skip
    assert run.wait(120) == 0, run.text()
    steps = run.lines()
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert max(line["staleness/versions_max"] for line in steps) <= 2
    assert run.leftovers() == []
    log = (run.folder.path / "logs" / "manager.log").read_text()
    assert "Traceback" not in log
