"""The tiny recipe from end to end: it learns, it is bounded, it leaves nothing behind."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def test_the_tiny_recipe_learns_within_its_bound_and_leaves_nothing_behind(start):
    run = start()
    assert run.wait(240) == 0, run.text()
    steps = run.lines()
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    rewards = [line["reward/mean"] for line in steps]
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:3]) / 3 + 0.25
    assert max(line["staleness/versions_max"] for line in steps) <= 1
    last = steps[-1]
    ended = last["experience/trained"] + last["experience/evicted"] + last["experience/filtered"] + last["experience/failed"]
    assert last["experience/admitted"] >= ended > 0
    assert run.leftovers() == []
    assert "memory" in run.text()
    assert "staleness" in run.text()
    status = subprocess.run(
        [sys.executable, "-m", "laminar.cli.main", "status", str(run.folder.path), "--json"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    facts = json.loads(status.stdout)
    assert (facts["status"], facts["step"]) == ("finished", len(steps))
    assert run.folder.read_state().redis_url == ""


@pytest.mark.parametrize("bound", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_fast_producer_never_breaks_the_bound(start, bound):
    run = start(
        f"staleness.max_staleness={bound}", "run.max_steps=12", "trainer.algorithm.options.filter_zero_variance=false"
    )
    assert run.wait(180) == 0, run.text()
    staleness = [line["staleness/versions_max"] for line in run.lines()]
    assert len(staleness) == 12
    assert 1 < max(staleness) <= bound


def test_trajectory_mode_with_two_workers_and_two_trainer_ranks_runs_to_the_end(start):
    run = start(
        "run.max_steps=6", "rollout.num_workers=2", "rollout.weight_update=trajectory", "trainer.num_ranks=2",
        "trainer.deepspeed.zero_stage=3", "staleness.max_staleness=2",
        "trainer.algorithm.options.filter_zero_variance=false",
    )  # fmt: skip
    assert run.wait(240) == 0, run.text()
    assert len(run.lines()) == 6
    assert run.leftovers() == []
