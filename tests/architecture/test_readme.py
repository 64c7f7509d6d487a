"""The README is true: its map names every module, its examples run."""

import re
import tomllib
from pathlib import Path

import pytest

from laminar.config.root import LaminarConfig
from laminar.types import Prompt
from rollout.environments.base import Observation

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PACKAGES = ("laminar", "relay", "rollout", "trainer")


def block(containing):
    """The one fenced block that holds this text."""
    (found,) = [text for text in re.findall(r"```\w*\n(.*?)```", README, re.S) if containing in text]
    return found


def read_map():
    """Folder to module names, as the README's map says."""
    named, folder = {}, ""
    for line in block("the ground floor").splitlines():
        if line.startswith("    "):
            named[folder] += line.split()
        else:
            folder = line.split("/ ")[0]
            named[folder] = []
    return {folder: sorted(names) for folder, names in named.items() if folder.split("/")[0] in PACKAGES}


def test_the_map_names_every_module_and_no_other():
    folders = [ROOT / name for name in PACKAGES] + [p for name in PACKAGES for p in (ROOT / name).rglob("*") if p.is_dir()]
    there = {
        str(folder.relative_to(ROOT)): sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")
        for folder in folders
    }
    assert read_map() == {folder: names for folder, names in there.items() if names}


def test_the_walked_through_config_is_a_valid_config():
    config = LaminarConfig.model_validate(tomllib.loads(block("a folder of a Hugging Face causal model")))
    assert config.staleness.bound == 2
    assert config.trainer.prompts_per_step * config.rollout.group_size == 32


def test_the_reward_example_runs_as_written():
    namespace = {}
    exec(block("def brevity"), namespace)
    assert namespace["brevity"](Prompt("1", "p"), "x" * 25) == pytest.approx(0.75)


async def test_the_environment_example_runs_as_written():
    namespace = {}
    exec(block("class SecondChance"), namespace)
    environment = namespace["SecondChance"]()
    assert await environment.reset(Prompt("1", "p")) == Observation("p")
    assert not (await environment.step(" ")).done
    assert (await environment.step("4")).done
    await environment.close()


@pytest.mark.parametrize("recipe", sorted((ROOT / "deploy" / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_named_in_the_readme(recipe):
    assert recipe.name in README
