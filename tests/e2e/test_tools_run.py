"""Agentic recipes from end to end: over several turns, a tiny model learns to ask its calculator the right question."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "recipes"


@pytest.mark.parametrize("name", ["tools", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_tiny_model_learns_over_several_turns(start, name):
    """Recipe `tools` steps an environment; recipe `agent` is played by an agent that knows only the `openai` client."""
    run = start("eval.path=", recipe=RECIPES / f"{name}.toml")
    assert run.wait(400) == 0, run.text()
    steps = run.lines()
    assert len(steps) == 40
    rewards = [line["reward/mean"] for line in steps]
    assert sum(rewards[-10:]) / 10 >= sum(rewards[:10]) / 10 + 0.1
    assert max(line["rollout/turns_mean"] for line in steps) > 1.5
    assert max(line["rollout/chains_mean"] for line in steps) == 1
    assert name == "agent" or any(line.get("rollout/count_tool_calls", 0) > 0.5 for line in steps)
    assert run.leftovers() == []
