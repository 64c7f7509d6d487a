"""The examples of rollout/README.md run verbatim."""

import asyncio
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

import rollout
from laminar.config.system import EnvironmentConfig, RewardConfig
from laminar.plugins import validate_options
from laminar.types import ClaimedGroup, Prompt, SamplingParameters
from rollout.agents import AgentPlayer
from rollout.environments.agent import Agent
from rollout.environments.factory import build_environment_factory
from rollout.environments.remote import Remote
from rollout.environments.verifiers import Verifiers
from rollout.episode import play_episode
from rollout.rewards.scorer import build_scorer
from rollout.scripted import CodePointTokenizer, ScriptedEngine
from rollout.tools.calls import write_call

README = Path(rollout.__file__).parent / "README.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """Writes the modules where a user would, and gives the TOML: rewards, and environments by kind."""
    for code in blocks("python"):
        (tmp_path / code.split("\n", 1)[0].removeprefix("# ")).write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for table in map(tomllib.loads, blocks("toml")):
        found |= (
            {"rewards": table["rewards"]} if "rewards" in table else {table["environment"]["kind"]: table["environment"]}
        )
    return found


async def play(examples, script, *, environment=None, rewards=()):
    return await play_episode(
        group=ClaimedGroup("00000000", 0, Prompt("p", "8 + 9 =", {"answer": "17"}), (0,), 0),
        member=0,
        attempt=0,
        engine=ScriptedEngine(script),
        make_environment=build_environment_factory(EnvironmentConfig(**(examples[environment] if environment else {}))),
        scorer=build_scorer([RewardConfig(**entry) for entry in rewards]),
        tokenizer=CodePointTokenizer(),
        sampling=SamplingParameters(1.0, 200, 0),
        run_seed=0,
        wall_seconds=10,
    )


@pytest.mark.parametrize(("answer", "reward"), [(" 17\n", 0.5), (" 18", 0.25), (" seventeen", 0.0), ("\n", 0.0)])
async def test_reward_example_scores_as_it_says(examples, answer, reward):
    trajectory = await play(examples, [answer], rewards=examples["rewards"])
    assert trajectory.reward == reward
    assert set(trajectory.reward_terms) == {"close"}


@pytest.mark.parametrize(
    ("script", "reward", "num_turns"), [([" 17"], 1.0, 1), ([" 16", " 17"], 0.5, 2), ([" 16", " 15"], 0.0, 2)]
)
async def test_environment_example_plays_as_it_says(examples, script, reward, num_turns):
    trajectory = await play(examples, script, environment="my_world:SecondChance")
    assert (trajectory.reward, len(trajectory.turns)) == (reward, num_turns)


@pytest.mark.parametrize(
    ("city", "told"), [("Oslo", "709000"), ("Rome", "error: Rome is not known; try one of Oslo, Bergen")]
)
async def test_tools_example_plays_as_it_says(examples, city, told):
    script = [write_call("population", {"city": city}), "17"]
    trajectory = await play(examples, script, environment="tools", rewards=[{"kind": "exact_match"}])
    text = "".join(map(chr, trajectory.chains[0].token_ids()))
    assert f"\ntool: {told}\nassistant: 17" in text
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(("answer", "reward"), [("17", 1.0), ("18", 0.0)])
async def test_the_agent_in_ten_lines_is_trained_as_written(examples, answer, reward):
    (code,) = [block for block in blocks("python") if "AsyncOpenAI" in block]
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith(("#", "from"))]) <= 10
    options = Agent.Options(**examples["agent"]["options"])
    player = AgentPlayer(options, CodePointTokenizer(), build_scorer([]), wall_seconds=30)
    trajectory = await player.play(
        ScriptedEngine(["It is 17.", answer]),
        ClaimedGroup("00000000", 0, Prompt("p", "8 + 9 =", {"answer": "17"}), (0,), 0),
        0,
        0,
        sampling=SamplingParameters(1.0, 200, 0),
        run_seed=0,
    )
    await player.gateway.close()
    assert (trajectory.reward, trajectory.failure) == (reward, None)
    (chain,) = trajectory.chains
    assert "".join(map(chr, chain.token_ids()[chain.mask()])) == "It is 17." + answer


@pytest.mark.slow
async def test_the_environment_example_is_served_to_other_machines(examples, tmp_path):
    command = [sys.executable, "-m", "rollout.environments.serve", "--kind", "my_world:SecondChance", "--port", "0"]
    path = os.pathsep.join([str(README.parents[1]), str(tmp_path)])
    server = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        url = (await asyncio.wait_for(server.stdout.readline(), 60)).decode().split()[-1]
        examples["remote"]["options"]["url"] = url
        trajectory = await play(examples, [" 16", " 17"], environment="remote")
    finally:
        server.kill()
        await server.wait()
    assert (trajectory.reward, len(trajectory.turns)) == (0.5, 2)


def test_options_of_the_other_examples_are_valid(examples):
    assert validate_options(Verifiers, examples["verifiers"]["options"]).env["taskset"]["id"] == "my-env"
    assert validate_options(Remote, examples["remote"]["options"]).retries == 3


def test_readme_lists_every_module():
    text = README.read_text("utf-8")
    missing = [
        file.name for file in README.parent.glob("*.py") if file.name != "__init__.py" and f"`{file.name}`" not in text
    ]
    assert missing == []
