"""The recipes for 8, 64 and 512 GPUs: `check` accepts them, and their split comes from the simulator."""

from pathlib import Path

import pytest

import laminar
from laminar.config.check import check_config
from laminar.config.load import load_config
from laminar.simulate.from_config import setting_of
from laminar.simulate.mapping import all_splits, best_split, spread

RECIPES = Path(laminar.__file__).parents[1] / "deploy" / "recipes"
TOTALS = (8, 64, 512)


def recipe(total, overrides=()):
    return load_config(RECIPES / f"math_{total}gpu.toml", list(overrides))


@pytest.mark.parametrize("total", TOTALS)
def test_a_recipe_is_accepted_and_uses_all_its_gpus(total):
    config = recipe(total)
    check_config(config, num_cores=64 * total)
    engine = config.rollout.engine
    assert config.trainer.num_ranks + config.rollout.num_workers * engine.tensor_parallel_size == total
    assert setting_of(config).num_gpus == total


@pytest.mark.parametrize("total", TOTALS)
def test_a_recipes_split_is_among_those_that_the_search_plays(total):
    config = recipe(total)
    played = spread(all_splits(setting_of(config), total))
    assert (config.trainer.num_ranks, config.rollout.num_workers) in [(s.train_gpus, s.num_replicas) for s in played]


@pytest.mark.slow
def test_the_smallest_recipes_split_is_the_best_of_those_played():
    config = recipe(8)
    split, _, _ = best_split(setting_of(config), 8)
    assert (split.train_gpus, split.num_replicas) == (config.trainer.num_ranks, config.rollout.num_workers)
