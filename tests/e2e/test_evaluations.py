"""Evaluation in and after a whole run: it changes nothing of training (D24); the command finds the same numbers."""

import json
import subprocess
import sys

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
    counted = [{k: v for k, v in line.items() if k.startswith(("staleness/", "train/l"))} for line in evaluated.lines()]
    assert counted == [{k: v for k, v in line.items() if k.startswith(("staleness/", "train/l"))} for line in plain.lines()]
    last = [run.folder.checkpoints / "step_000006" for run in (evaluated, plain)]
    first, second = map(weights, last)
    assert all((first[name] == second[name]).all() for name in first)
    extras = [json.loads((folder / "extra.json").read_text()) for folder in last]
    assert extras[0]["frontier"] == extras[1]["frontier"]
    random_states = [(folder / "rng_000.json").read_text() for folder in last]
    assert random_states[0] == random_states[1]

    again = json.loads(laminar("eval", evaluated.folder.path, "--json"))
    assert again["version_number"] == 6
    assert again["mean"]["value"] == pytest.approx(found[6]["eval/accuracy"])
    before = json.loads(laminar("eval", evaluated.folder.path, "--step", 0, "--json"))
    assert before["mean"]["value"] == pytest.approx(found[0]["eval/accuracy"])
    laminar("export", evaluated.folder.path, tmp_path / "exported")
    exported = json.loads(laminar("eval", tmp_path / "exported", "-c", evaluated.folder.config, "--json"))
    assert exported["mean"] == again["mean"]
