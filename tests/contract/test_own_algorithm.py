"""The README's algorithm of one's own is a whole file of under 40 lines, runs as written, and does what it says."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from laminar.config.check import check_config
from laminar.config.load import load_config
from laminar.errors import ConfigError
from trainer.algorithms.base import TokenInputs
from trainer.session import build_algorithm

README = (Path(__file__).parents[2] / "trainer" / "README.md").read_text()


def block(containing):
    """The one fenced block that holds this text."""
    (found,) = [text for text in re.findall(r"```\w*\n(.*?)```", README, re.S) if containing in text]
    return found


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write the README's file and config, and load them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "best_of_group", raising=False)
    (tmp_path / "best_of_group.py").write_text(block("class BestOfGroup("))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}))

    def write_and_load(edit=lambda text: text):
        text = 'model.path = "policy"\ndata.path = "rows.jsonl"\nrewards = [{kind = "exact_match"}]\n'
        (tmp_path / "run.toml").write_text(text + edit(block("best_of_group:BestOfGroup")))
        return load_config(tmp_path / "run.toml")

    yield write_and_load
    sys.modules.pop("best_of_group", None)


def test_it_takes_one_file_of_under_40_lines():
    assert len(block("class BestOfGroup(").splitlines()) < 40


def test_check_accepts_it_and_judges_its_options(load):
    assert check_config(load(), num_cores=64) == []
    with pytest.raises(ConfigError, match=r"unknown key `trainer\.algorithm\.options\.clop`: did you mean clip"):
        check_config(load(lambda text: text.replace("clip =", "clop =")), num_cores=64)


def test_it_trains_the_best_of_each_group(load, trajectory_maker):
    algorithm = build_algorithm(load())
    play, broken = trajectory_maker.play, trajectory_maker.break_down
    groups = [[play("a", 0, "0.0", reward=1.0), play("a", 1, "0.0", reward=3.0), broken("a", 2)], [play("b", 0, "0.0")]]
    assert algorithm.advantages(groups) == {"a-000": 0.0, "a-001": 1.0, "b-000": 1.0}
    assert algorithm.keeps(groups[0])
    logprobs = torch.log(torch.tensor([[0.5, 0.2, 0.9]])).requires_grad_()
    rollout = torch.log(torch.tensor([[0.25, 0.2, 0.1]]))
    mask = torch.tensor([[True, True, False]])
    loss = algorithm.policy_loss(TokenInputs(logprobs, mask, torch.ones(1, 3), rollout, torch.zeros(1, 3)))
    torch.testing.assert_close(loss.losses.detach(), torch.tensor([[-1.1, -1.0, 0.0]]))
    loss.losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -1.0, 0.0]]))
