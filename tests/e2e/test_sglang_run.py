"""One whole run with the real SGLang server as its engine, on the CPU."""

from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs `make sglang-cpu`"),
]


def test_the_tiny_recipe_runs_on_sglang_within_its_bound_and_leaves_nothing_behind(start):
    run = start(
        "run.max_steps=5", "rollout.engine.kind=sglang", f"rollout.engine.python={PYTHON}",
        "trainer.algorithm.options.filter_zero_variance=false",
    )  # fmt: skip
    assert run.wait(420) == 0, run.text()
    steps = run.lines()
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert max(line["staleness/versions_max"] for line in steps) <= 1
    assert "held-out accuracy at version 5" in run.text()  # so the engine went along
    assert run.leftovers() == []
