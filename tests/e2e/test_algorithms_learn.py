"""Every algorithm learns the tiny task from chance (0.27) to a mean reward of 0.85 within 30 steps, on three seeds.

In one process: `benchmarks/learning.py` samples with the torch engine and trains with the real step.
"""

import importlib.util
from pathlib import Path
from statistics import mean

import pytest

from trainer.algorithms import ALGORITHMS
from trainer.ranks import join_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
BAR, STEPS = 0.85, 30
CORRECTED = {"decoupled_ppo": {"weight": "token_tis"}}


@pytest.fixture(scope="module")
def learn():
    spec = importlib.util.spec_from_file_location("learning", ROOT / "benchmarks" / "learning.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ranks = join_ranks(0, 1)
    yield lambda work, trainer, **more: module.learn(module.MODEL, work, ranks, trainer, **more)
    ranks.leave()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_it_learns_the_tiny_task(kind, seed, learn, tmp_path):
    trainer = {"algorithm": {"kind": kind}, "correction": CORRECTED.get(kind, {})}
    rewards = learn(tmp_path, trainer, seed=seed, steps=STEPS)
    assert mean(rewards[:3]) < 0.4
    assert mean(rewards[-5:]) >= BAR


@pytest.mark.parametrize("kind", ["reinforce_plus_plus", "ppo"])
def test_without_a_group_one_attempt_a_prompt_is_enough(kind, learn, tmp_path):
    rewards = learn(tmp_path, {"algorithm": {"kind": kind}}, seed=0, steps=60, group_size=1)
    assert mean(rewards[-10:]) >= mean(rewards[:10]) + 0.2
