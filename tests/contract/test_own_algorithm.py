"""The README's algorithms of one's own are whole files of under 40 lines, run as written, and do what they say."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from laminar.config.check import check_config
from laminar.config.load import load_config
from laminar.errors import ConfigError
from trainer.algorithms.base import RowScores, TokenInputs
from trainer.engine import TrainerEngine
from trainer.session import build_algorithm
from trainer.step import train_step

README = (Path(__file__).parents[2] / "trainer" / "README.md").read_text()


def block(containing):
    """The one fenced block that holds this text."""
    (found,) = [text for text in re.findall(r"```\w*\n(.*?)```", README, re.S) if containing in text]
    return found


OWN = {"best_of_group": "BestOfGroup", "actor_critic": "ActorCritic"}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write the README's file and config, and load them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module, name in OWN.items():
        (tmp_path / f"{module}.py").write_text(block(f"class {name}("))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}))

    def write_and_load(edit=lambda text: text):
        text = 'model.path = "policy"\nstaleness.max_staleness = "unbounded"\n'
        text += 'data.path = "rows.jsonl"\nrewards = [{kind = "exact_match"}]\n'
        (tmp_path / "run.toml").write_text(text + edit(block("best_of_group:BestOfGroup")))
        return load_config(tmp_path / "run.toml")

    yield write_and_load
    for module in OWN:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("name", OWN.values())
def test_it_takes_one_file_of_under_40_lines(name):
    assert len(block(f"class {name}(").splitlines()) < 40


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


def of_actor_critic(text):
    return text.replace("best_of_group:BestOfGroup", "actor_critic:ActorCritic").replace("options = { clip = 0.1 }\n", "")


def test_the_actor_critic_is_paid_for_what_the_critic_comes_to_expect(load, trajectory_maker):
    config = load(of_actor_critic)
    assert check_config(config, num_cores=64) == []
    algorithm = build_algorithm(config)
    assert algorithm.advantages([[trajectory_maker.play("a", 0, "0.0", reward=3.0)]]) == {"a-000": 3.0}
    mask, values = np.array([False, True, False, True]), np.float32([9, 0.5, 9, 2.0])
    advantages = algorithm.token_advantages(3.0, RowScores(mask, values, values=values))
    assert advantages.tolist() == [0.0, 1.5, 0.0, 1.0]


@pytest.mark.heavy
@pytest.mark.parametrize("edit", [str, of_actor_critic], ids=OWN.values())
def test_it_trains_in_a_real_step(edit, load, ranks, trajectory_maker, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "policy")
    config = load(edit)
    algorithm = build_algorithm(config)
    engine = TrainerEngine(config, ranks, algorithm.needs)
    before = {name: tensor.detach().clone() for name, tensor in engine.state_tensors()}
    groups = [tuple(trajectory_maker.play("a", member, "0.0", reward=float(member)) for member in range(3))]
    report = train_step(engine, algorithm, groups, 1)
    assert report.skipped_reason is None
    assert report.metrics["train/grad_norm"] > 0
    assert ("train/value_loss" in report.metrics) == (engine.critic is not None) == (edit is of_actor_critic)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.state_tensors())
