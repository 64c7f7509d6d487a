"""The recipes for 8, 64 and 512 GPUs: `check` accepts them, and their split and bound come from the simulator."""

from pathlib import Path

import pytest

import laminar
from laminar.config.check import check_config
from laminar.config.load import load_config
from laminar.simulate.from_config import setting_of
from laminar.simulate.sweep import advise

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


@pytest.mark.parametrize("total", [8, *(pytest.param(total, marks=pytest.mark.slow) for total in TOTALS[1:])])
def test_a_recipe_has_the_split_and_the_bound_that_the_simulator_recommends(total):
    config = recipe(total)
    advice = advise(lambda overrides: recipe(total, overrides), total, lambda setting: setting)
    assert (advice.split.train_gpus, advice.split.num_replicas) == (config.trainer.num_ranks, config.rollout.num_workers)
    assert (advice.bound, advice.max_in_flight_groups) == (config.staleness.bound, config.rollout.max_in_flight_groups)
