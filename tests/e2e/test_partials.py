"""A worker is killed in the middle of long answers: its successor goes on behind what was put by."""

import os
import signal

import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_what_a_killed_worker_had_sampled_is_not_sampled_again(start):
    run = start(
        "run.max_steps=8", "rollout.max_new_tokens=96", "experience.partial_tokens=8", "rollout.lease_seconds=4",
        "rollout.sampling.stop_token_ids=[0]", "trainer.algorithm.options.filter_zero_variance=false", "eval.path=''",
    )  # fmt: skip
    run.wait_for_step(2, 240)
    worker = run.role_pid("rollout-0")
    os.kill(worker, signal.SIGKILL)
    run.wait_until(lambda: run.role_pid("rollout-0") != worker, "another worker", 60.0)
    assert run.wait(240) == 0, run.text()
    steps = run.lines()
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert max(line.get("worker/resumed_tokens", 0) for line in run.lines()) > 0, run.text()
    assert max(line["staleness/versions_max"] for line in steps) <= 1
    assert run.leftovers() == []
