"""The makers of the recipes' data and the tiny model, and the check of a run's prompts at start."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import rollout
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from rollout.addition import make_rows
from rollout.data import load_run_prompts
from rollout.tiny import NEWLINE_ID, make_model, write_jsonl
from rollout.tiny import make_rows as make_tiny_rows

RECIPES = Path(rollout.__file__).parents[1] / "deploy" / "recipes"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    assert make_model(folder) < 1_000_000
    train, held_out = make_tiny_rows()
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", held_out)
    return folder


def config(**sections):
    base = {
        "model": {"path": "."},
        "data": {"path": "train.jsonl"},
        "rewards": [{"kind": "rollout.tiny:reward"}],
        "eval": {"path": "heldout.jsonl", "num_prompts": 5},
    }
    return LaminarConfig.model_validate(base | sections)


def test_a_run_gets_its_training_and_the_first_held_out_prompts(tiny_folder):
    prompts, held_out = load_run_prompts(config(), tiny_folder)
    assert (len(prompts), len(held_out)) == (80, 5)
    assert not {prompt.content for prompt in prompts} & {prompt.content for prompt in held_out}


def test_a_run_without_evaluation_has_no_held_out_prompts(tiny_folder):
    assert load_run_prompts(config(eval={}), tiny_folder)[1] == []


def test_a_prompt_that_is_too_long_is_refused_at_start(tiny_folder):
    with pytest.raises(ConfigError, match=r"train-000000 has 3 tokens, data.max_prompt_tokens is 2"):
        load_run_prompts(config(data={"path": "train.jsonl", "max_prompt_tokens": 2}), tiny_folder)


def test_a_reward_that_cannot_judge_a_prompt_is_refused_at_start(tiny_folder):
    with pytest.raises(ConfigError, match=r"no column 'answer', only \['digit'\]"):
        load_run_prompts(config(rewards=[{"kind": "exact_match"}]), tiny_folder)


def test_the_tiny_model_is_the_same_every_time(tiny_folder, tmp_path):
    make_model(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (tiny_folder / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_tiny_recipe_stops_at_the_newline():
    recipe = tomllib.loads((RECIPES / "tiny.toml").read_text("utf-8"))
    assert recipe["rollout"]["sampling"]["stop_token_ids"] == [NEWLINE_ID]


def operands(text):
    return frozenset(tuple(sorted((int(a), int(b)))) for a, b in re.findall(r"(\d+) \+ (\d+) =", text))


def question(row):
    return operands(row["prompt"].splitlines()[-1])


def test_addition_is_right_and_its_shape_is_few_shot():
    train, held_out = make_rows(500, 100, seed=3)
    assert (len(train), len(held_out)) == (500, 100)
    for row in train + held_out:
        assert re.fullmatch(r"(\d+ \+ \d+ = \d+\n){2}\d+ \+ \d+ =", row["prompt"])
        *solved, (first, second, _) = re.findall(r"(\d+) \+ (\d+) =(?: (\d+))?", row["prompt"])
        assert all(int(a) + int(b) == int(c) for a, b, c in solved)
        assert row["answer"] == str(int(first) + int(second))
        assert 1 <= int(first) <= 20
        assert 1 <= int(second) <= 20


def test_held_out_sums_never_occur_in_training_in_either_order():
    train, held_out = make_rows(2000, 100, seed=0)
    shown = frozenset().union(*(operands(row["prompt"]) for row in train))
    assert not any(question(row) & shown for row in held_out)
    assert all(len(operands(row["prompt"])) >= 2 for row in held_out)


def test_addition_data_depends_on_the_seed_alone():
    assert make_rows(20, 10, seed=1) == make_rows(20, 10, seed=1)
    assert make_rows(20, 10, seed=1) != make_rows(20, 10, seed=2)
