"""`max_staleness = 0` is on-policy: batch by batch and loss by loss what a synchronous loop does."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import xxhash

pytestmark = pytest.mark.e2e

STEPS = 6


def load_oracle():
    spec = importlib.util.spec_from_file_location("oracle", Path(__file__).with_name("oracle.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(token_ids):
    """Hash of all sampled ids in training order, as the trainer logs it."""
    return xxhash.xxh3_64_hexdigest(np.concatenate([np.asarray(ids, np.int32) for ids in token_ids]).tobytes())


@pytest.mark.parametrize("seed", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_a_run_at_bound_0_equals_the_synchronous_oracle_seed_by_seed(start, tmp_path_factory, seed):
    root = Path(__file__).resolve().parents[2]
    expected = load_oracle().run_oracle(root / "models" / "tiny", tmp_path_factory.mktemp("oracle"), STEPS, seed)
    run = start(
        "staleness.max_staleness=0", f"run.max_steps={STEPS}", f"run.seed={seed}",
        "trainer.algorithm.options.filter_zero_variance=false", "eval.path=''",
    )  # fmt: skip
    assert run.wait(180) == 0, run.text()
    steps = run.lines()
    assert [line["staleness/versions_max"] for line in steps] == [0] * STEPS
    assert [line["batch"] for line in steps] == [digest(step.token_ids) for step in expected]
    assert [line["reward/mean"] for line in steps] == pytest.approx([step.mean_reward for step in expected], abs=1e-9)
    assert [line["train/loss"] for line in steps] == pytest.approx([step.loss for step in expected], abs=2e-6)
