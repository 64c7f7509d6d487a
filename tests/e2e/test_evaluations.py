"""Evaluation in and after a whole run: it changes nothing of training (D24); the command finds the same numbers."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ON_POLICY = ("run.max_steps=6", "staleness.max_staleness=0", "trainer.algorithm.options.filter_zero_variance=false")


def laminar(*arguments):
    command = [sys.executable, "-m", "laminar.cli.main", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def test_training_is_the_same_with_evaluations_and_without(start, tmp_path):
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    evaluated = start(*ON_POLICY, "eval.every_steps=2", directory=tmp_path / "with")
    assert evaluated.wait(240) == 0, evaluated.text()
    plain = start(*ON_POLICY, "eval.path=", directory=tmp_path / "without")
    assert plain.wait(240) == 0, plain.text()
    assert [line["batch"] for line in evaluated.lines()] == [line["batch"] for line in plain.lines()]
    assert plain.lines("evaluation") == []
    found = {line["step"]: line for line in evaluated.lines("evaluation")}
    assert list(found) == [0, 2, 4, 6]
    assert all((line["eval/num_prompts"], line["eval/failed"]) == (20, 0) for line in found.values())
    for line, other in zip(evaluated.lines(), plain.lines(), strict=True):
        for key in (key for key in line if key.startswith(("staleness/", "train/l"))):
            # Which requests an engine computes at once hangs on when they come: log-probs differ in their last bits.
            assert line[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    last = [run.folder.checkpoints / "step_000006" for run in (evaluated, plain)]
    first, second = map(weights, last)
    for name in first:
        assert np.linalg.norm(first[name] - second[name]) <= 1e-3 * np.linalg.norm(first[name]), name
    extras = [json.loads((folder / "extra.json").read_text()) for folder in last]
    frontiers = [extra["frontier"] for extra in extras]
    flat = [frontier.pop("counters") for frontier in frontiers]
    counters = [dict(zip(names[::2], names[1::2], strict=True)) for names in flat]
    assert frontiers[0] == frontiers[1]
    for place in ("admitted", "trained", "evicted", "filtered", "failed"):  # refused claims are a matter of time
        assert counters[0].get(place) == counters[1].get(place), place
    drawn = [json.loads((folder / "rng_000.json").read_text()) for folder in last]
    for name in ("torch", "numpy"):  # of Python's own, libraries draw for their pauses
        assert drawn[0][name] == drawn[1][name], name

    again = json.loads(laminar("eval", evaluated.folder.path, "--json"))
    assert again["version_number"] == 6
    assert again["mean"]["value"] == pytest.approx(found[6]["eval/accuracy"])
    before = json.loads(laminar("eval", evaluated.folder.path, "--step", 0, "--json"))
    assert before["mean"]["value"] == pytest.approx(found[0]["eval/accuracy"])
    laminar("export", evaluated.folder.path, tmp_path / "exported")
    exported = json.loads(laminar("eval", tmp_path / "exported", "-c", evaluated.folder.config, "--json"))
    assert exported["mean"] == again["mean"]


def test_evaluations_that_a_resume_takes_back_are_made_again(start):
    """Killed once version 6 was evaluated; the spool is lost from step 6 on, so the run goes on from step 5."""
    run = start(*ON_POLICY, "run.max_steps=10", "checkpoint.every_steps=5", "eval.every_steps=2")
    run.wait_until(lambda: any(line["step"] == 6 for line in run.lines("evaluation")), "the evaluation of 6", 240)
    run.process.kill()
    run.process.wait()
    run.wait_until_gone()
    (run.folder.checkpoints / "replay" / "step_000006").unlink()
    resumed = start(resume=run.folder.path)
    assert resumed.wait(240) == 0, resumed.text()
    assert "opens at step 5" in resumed.text()
    assert [line["step"] for line in resumed.lines("evaluation")] == [0, 2, 4, 6, 8, 10]
