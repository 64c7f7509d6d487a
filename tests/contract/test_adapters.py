"""Adapters against the real packages: gymnasium, textarena, reasoning_gym, MCP servers; verl's data and reward functions."""

import json
import re
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from laminar.config.system import DataConfig, EnvironmentConfig, RewardConfig
from laminar.errors import ConfigError
from laminar.types import ClaimedGroup, FailureKind, Prompt, SamplingParameters
from rollout.data import load_prompts
from rollout.environments.factory import build_environment_factory
from rollout.episode import play_episode
from rollout.rewards.base import RewardContext
from rollout.rewards.scorer import build_scorer
from rollout.scripted import CodePointTokenizer, ScriptedEngine
from rollout.tools.calls import Call, write_call
from rollout.tools.mcp import Mcp
from rollout.tools.toolbox import Toolbox


async def play(kind, options, *script, prompt=None, rewards=()):
    engine = ScriptedEngine(script)
    trajectory = await play_episode(
        group=ClaimedGroup("0", 0, prompt or Prompt("p", "Play.", {"seed": 3}), (0,), 0),
        member=0,
        attempt=0,
        engine=engine,
        make_environment=build_environment_factory(EnvironmentConfig(kind=kind, options=options)),
        scorer=build_scorer([RewardConfig(**reward) for reward in rewards]),
        tokenizer=CodePointTokenizer(),
        sampling=SamplingParameters(1.0, 10_000, 0),
        run_seed=0,
        wall_seconds=60,
        max_turns=20,
    )
    return trajectory, ["".join(map(chr, request.input_ids)) for request in engine.requests]


# ---- gymnasium

LAKE = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "settings": {"is_slippery": False}}


async def test_a_frozen_lake_is_crossed_in_words():
    moves = [
        "down",
        "I go Down.",
        "right",
        "hm",
        "left or right? right",
        "down",
        "right",
    ]  # around the holes of the 4 x 4 map
    trajectory, seen = await play("gymnasium", LAKE, *moves)
    assert (trajectory.reward, trajectory.reward_terms) == (1.0, {"return": 1.0})
    assert trajectory.counts == {"malformed_actions": 1}
    assert "SFFF" in re.sub(r"\x1b\[[0-9;]*m", "", seen[0])
    assert "say one of: left, down, right, up" in seen[4]


async def test_a_hole_in_the_ice_ends_the_episode_without_reward():
    trajectory, seen = await play("gymnasium", LAKE, "right", "down")
    assert (trajectory.reward, len(seen)) == (0.0, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({**LAKE, "actions": ["left"]}, "has 4 actions"),
        ({"id": "Pendulum-v1", "actions": ["push"], "render": False}, "Discrete"),
    ],
)
async def test_actions_that_do_not_fit_are_a_failure_that_says_so(options, text):
    trajectory, _ = await play("gymnasium", options)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert text in trajectory.failure.text


# ---- textarena


@pytest.mark.slow
async def test_a_textarena_game_is_played_and_scored_by_its_own_rules():
    numbers = [f"[{number}]" for number in range(1, 21)]
    trajectory, seen = await play("textarena", {"game": "GuessTheNumber-v0"}, "first?", *numbers)
    assert trajectory.failure is None
    assert "You have to guess the number between 1 and 20" in seen[0]
    assert "invalid move" in seen[1]
    assert re.search(r"target number is (higher|lower)", seen[2])
    assert seen[2].count("You have to guess") == 1
    assert set(trajectory.reward_terms) == {"game"}


@pytest.mark.slow
async def test_a_won_textarena_game_is_worth_what_the_game_says():
    import textarena

    game = textarena.make("GuessTheNumber-v0")
    game.reset(num_players=1, seed=3)
    while hasattr(game, "env"):
        game = game.env
    trajectory, _ = await play("textarena", {"game": "GuessTheNumber-v0"}, f"[{game.state.game_state['game_number']}]")
    assert trajectory.reward == 1.0


@pytest.mark.slow
async def test_a_game_for_two_is_refused():
    trajectory, _ = await play("textarena", {"game": "TicTacToe-v0"})
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT


# ---- reasoning_gym


@pytest.mark.slow
async def test_reasoning_gyms_tasks_are_scored_by_their_own_scorers():
    from rollout.reasoning_data import make_rows

    rows = make_rows(["basic_arithmetic", "chain_sum"], 4, seed=1, instruction=" Answer in tags.")
    assert [row["entry"]["metadata"]["source_dataset"] for row in rows] == ["basic_arithmetic", "chain_sum"] * 2
    scorer = build_scorer([RewardConfig(kind="reasoning_gym", timeout_seconds=120.0)])
    prompts = [Prompt(str(n), row["prompt"], {"entry": row["entry"]}) for n, row in enumerate(rows)]
    scorer.check(prompts)
    right = [RewardContext(f"r{p.prompt_id}", p, f"So <answer> {p.fields['entry']['answer']} </answer>") for p in prompts]
    wrong = [RewardContext(f"w{p.prompt_id}", p, "<answer>pear</answer>") for p in prompts]
    scores = await scorer.score_batch(right + wrong)
    assert [scores[context.trajectory_id].reward for context in right] == [1.0] * 4
    assert all(scores[context.trajectory_id].reward < 0.5 for context in wrong)
    with pytest.raises(ConfigError, match=r"rollout\.reasoning_data"):
        scorer.check([Prompt("x", "?", {"answer": "1"})])


# ---- MCP

SERVER = """
from mcp.server import MCPServer
server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def divide(a: int, b: int) -> float:
    "Divide."
    return a / b

@server.tool()
def die() -> str:
    "End the server."
    import os
    os._exit(3)

server.run("stdio")
"""


@pytest.fixture
async def mcp_box(tmp_path):
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    box = Toolbox([SimpleNamespace(kind="mcp", options={"command": [sys.executable, str(file)]})], 30.0, 4000)
    await box.open()
    yield box
    await box.close()


@pytest.mark.slow
async def test_an_mcp_servers_tools_are_called_and_their_errors_told(mcp_box):
    assert {schema["function"]["name"] for schema in mcp_box.schemas()} == {"add", "divide", "die"}
    add = mcp_box.schemas()[0]["function"]
    assert (add["description"], add["parameters"]["required"]) == ("Add two numbers.", ["a", "b"])
    answer = await mcp_box.answer(Call("add", {"a": 2, "b": 3}))
    assert (answer.text, answer.is_result) == ("5", True)
    for call in (Call("divide", {"a": 1, "b": 0}), Call("add", {"a": "pear"})):
        answer = await mcp_box.answer(call)
        assert not answer.is_result
        assert answer.text.startswith("error: ")


@pytest.mark.slow
async def test_an_mcp_server_that_dies_is_a_failure_of_kind_tool(mcp_box):
    from rollout.boundary import EpisodeError

    with pytest.raises(EpisodeError) as caught:
        await mcp_box.answer(Call("die", {}))
    assert caught.value.failure.kind is FailureKind.TOOL


@pytest.mark.slow
async def test_a_whole_episode_with_an_mcp_server_opens_and_closes_it(tmp_path):
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    source = {"kind": "mcp", "options": {"command": [sys.executable, str(file)], "only": ["add"]}}
    trajectory, seen = await play(
        "tools",
        {"tools": [source]},
        write_call("add", {"a": 2, "b": 3}),
        "5",
        prompt=Prompt("p", "2 + 3?", {"answer": "5"}),
        rewards=[{"kind": "exact_match"}],
    )
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)
    assert seen[0].startswith("tools: add\n")


PAGES = """
import json, sys

def say(request, **answer):
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)

def tool(name):
    return {"name": name, "description": name, "inputSchema": {"type": "object", "properties": {}}}

for line in sys.stdin:
    request = json.loads(line)
    parameters = request.get("params") or {}
    if "id" not in request:
        continue
    if request["method"] == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "pages", "version": "1"}}
        say(request, result={"protocolVersion": parameters["protocolVersion"], **about})
    elif request["method"] == "tools/list":
        page = {"tools": [tool("second")]} if "cursor" in parameters else {"tools": [tool("first")], "nextCursor": "2"}
        say(request, result=page)
    elif request["method"] == "tools/call":
        say(request, error={"code": -32000, "message": "issue 7 is already closed"})
    else:
        say(request, error={"code": -32601, "message": "there is no such method"})
"""


@pytest.fixture
async def paged(tmp_path):
    """Opens a box with a server that tells its tools in two pages, and calls every issue closed."""
    file = tmp_path / "pages.py"
    file.write_text(PAGES)
    boxes = []

    async def open_box(**options):
        source = SimpleNamespace(kind="mcp", options={"command": [sys.executable, str(file)], **options})
        boxes.append(Toolbox([source], 30.0, 4000))
        await boxes[-1].open()
        return boxes[-1]

    yield open_box
    for box in boxes:
        await box.close()


@pytest.mark.slow
async def test_all_pages_of_an_mcp_servers_tools_are_offered(paged):
    assert list((await paged()).tools) == ["first", "second"]
    assert list((await paged(only=["second"])).tools) == ["second"]


@pytest.mark.slow
async def test_a_tool_that_an_mcp_server_does_not_have_is_refused_by_name(paged):
    with pytest.raises(ConfigError, match="no tool 'typo', only first, second"):
        await paged(only=["first", "typo"])


@pytest.mark.slow
async def test_an_mcp_tools_error_that_speaks_of_closing_is_told_to_the_policy(paged):
    answer = await (await paged()).answer(Call("first", {}))
    assert (answer.text, answer.is_result) == ("error: issue 7 is already closed", False)


def test_an_mcp_server_is_a_program_or_an_address():
    with pytest.raises(ValueError, match="either `command` or `url`"):
        Mcp.Options()


# ---- verl


def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False):
    """As a user of verl writes it."""
    return {
        "score": float(solution_str.strip() == ground_truth),
        "source": data_source,
        "index": extra_info["index"],
        "s": strict,
    }


@pytest.mark.parametrize("shape", [lambda score: score, lambda score: score["score"], lambda score: (score["score"], "why")])
async def test_verls_parquet_and_reward_function_run_unchanged(tmp_path, monkeypatch, shape):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(2)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    prompts = load_prompts(DataConfig(path="train.parquet"), tmp_path)
    assert [prompt.content[0].content for prompt in prompts] == ["0 + 1?", "1 + 1?"]
    asked = []

    def function(**named):
        asked.append(named)
        return shape(compute_score(**named))

    monkeypatch.setitem(sys.modules, "reward_of_the_user", SimpleNamespace(compute_score=function))
    options = {"function": "reward_of_the_user:compute_score", "arguments": {"strict": True}}
    scorer = build_scorer([RewardConfig(kind="verl", options=options)])
    scorer.check(prompts)
    scores = await scorer.score_batch([RewardContext(p.prompt_id, p, " 1") for p in prompts])
    assert [score.reward for score in scores.values()] == [1.0, 0.0]
    assert sorted(asked, key=lambda named: named["ground_truth"])[0] == {
        "data_source": "openai/gsm8k", "solution_str": " 1", "ground_truth": "1",
        "extra_info": {"split": "train", "index": 0}, "strict": True,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="reward_model"):
        scorer.check([Prompt("x", "?", json.loads('{"answer": "1"}'))])
