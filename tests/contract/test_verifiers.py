"""Environment `verifiers` against the real package, with a small environment made by its public API."""

import asyncio
import sys
from pathlib import Path

import pytest

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError, EngineError
from laminar.types import ClaimedGroup, FailureKind, Prompt, SamplingParameters
from rollout.agents import build_agent_player
from rollout.rewards.scorer import RewardScorer
from rollout.scripted import CodePointTokenizer, ScriptedEngine

pytestmark = pytest.mark.slow  # the package takes seconds to import

ENV = {"taskset": {"id": "verifiers-sums"}, "agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture
async def player(monkeypatch, tmp_path):
    """Makes players of one environment and closes them."""
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    players = []

    def make(env=ENV, **environment):
        config = LaminarConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"path": "d", "max_prompt_tokens": 100},
                "environment": {"kind": "verifiers", "options": {"env": env}, "wall_seconds": 30, **environment},
            }
        )
        players.append(build_agent_player(config, CodePointTokenizer(), RewardScorer([])))
        return players[-1]

    yield make
    for one in players:
        await one.close()
    sys.modules.pop("verifiers_sums", None)


async def play(player, *script, member=0, **task):
    data = {"prompt": "8 + 9 =", "answer": "17", **task}
    engine = ScriptedEngine(script)
    trajectory = await player.play(
        engine,
        ClaimedGroup("0", 0, Prompt("p", "8 + 9 =", {"task": data}), (member,), 0),
        member,
        0,
        sampling=SamplingParameters(1.0, 100, 0),
        run_seed=0,
    )
    return trajectory, engine.requests


async def test_an_episode_is_a_trajectory_with_the_ids_that_the_engine_saw(player):
    trajectory, requests = await play(player(), "hm", "17")
    assert trajectory.failure is None
    assert trajectory.reward == 1.0 - 0.25
    assert trajectory.reward_terms == {"right": 1.0, "second_try": -0.25}
    (chain,) = trajectory.chains
    assert tuple(chain.token_ids()[: trajectory.turns[1].start]) == requests[1].input_ids
    assert "".join(map(chr, chain.token_ids()[chain.mask()])) == "hm17"
    assert "A number, please." in "".join(map(chr, requests[1].input_ids))


async def test_many_episodes_at_once_keep_their_calls_apart(player):
    shared = player()
    answers = ["17" if n % 2 else "18" for n in range(16)]
    played = await asyncio.gather(*[play(shared, answer, member=n) for n, answer in enumerate(answers)])
    assert [trajectory.reward for trajectory, _ in played] == [float(answer == "17") for answer in answers]
    servers = shared.driver._environment._interception.servers
    assert [len(server.clients) for server in servers] == [1]  # not one HTTP client a trajectory


@pytest.mark.parametrize(
    ("trouble", "kind", "text"),
    [
        ("setup", FailureKind.ENVIRONMENT, "the sandbox has no disk"),
        ("scoring", FailureKind.VERIFIER, "the checker broke"),
        ("harness", FailureKind.ENVIRONMENT, "the harness broke"),
    ],
)
async def test_what_goes_wrong_in_the_environment_is_a_failure_with_its_kind(player, trouble, kind, text):
    trajectory, _ = await play(player(), "17", trouble=trouble)
    assert (trajectory.reward, trajectory.failure.kind) == (None, kind)
    assert text in trajectory.failure.text


async def test_a_dead_engine_is_the_engines_failure(player):
    trajectory, _ = await play(player(), EngineError("gone"))
    assert trajectory.failure.kind is FailureKind.ENGINE


async def test_the_turn_budget_ends_its_agent_which_is_scored_as_it_stands(player):
    trajectory, requests = await play(player(max_turns=1), "hm", "17")
    assert (trajectory.reward, len(requests)) == (0.0, 1)


async def test_a_prompt_without_a_task_says_where_they_come_from(player):
    trajectory = await player().play(
        ScriptedEngine([]),
        ClaimedGroup("0", 0, Prompt("p", "?", {}), (0,), 0),
        0,
        0,
        sampling=SamplingParameters(1.0, 100, 0),
        run_seed=0,
    )
    assert (trajectory.failure.kind, "rollout.verifiers_data" in trajectory.failure.text) == (FailureKind.USER_BUG, True)


def test_settings_that_the_package_refuses_are_told_at_start(player):
    with pytest.raises(ConfigError, match=r"environment\.options\.env: verifiers refuses it"):
        player({"taskset": {"id": "no-such-taskset-here"}})


def test_rows_are_made_of_the_taskset(player):
    from rollout.verifiers_data import make_rows

    rows = make_rows(ENV, 2, skip=1)
    assert [(row["prompt"], row["task"]["answer"]) for row in rows] == [("1 + 1 =", "2"), ("2 + 1 =", "3")]


async def test_shared_servers_that_could_not_be_brought_up_fail_that_episode_and_are_tried_again(player, monkeypatch):
    driver = player().driver
    errors, serving = [KeyError("port"), OSError("port in use")], driver._environment.serving

    def sometimes():
        if errors:
            raise errors.pop(0)
        return serving()

    monkeypatch.setattr(driver._environment, "serving", sometimes)
    async with asyncio.timeout(20):
        for error in (KeyError, OSError):
            with pytest.raises(error):
                await driver._serve()
        await driver._serve()
