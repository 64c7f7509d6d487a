"""Environment `tools`: calls are run and told, mistakes are told and counted, the turn without a call is the answer."""

import json

import pytest

from laminar.config.system import EnvironmentConfig, RewardConfig
from laminar.errors import ConfigError
from laminar.types import ClaimedGroup, FailureKind, FinishReason, Message, Prompt, SamplingParameters
from rollout.environments.factory import build_environment_factory
from rollout.episode import play_episode
from rollout.rewards.scorer import build_scorer
from rollout.scripted import CodePointTokenizer, ScriptedEngine
from rollout.tiny_tools import clumsy_dialogue, make_rows
from rollout.tools.calls import write_call

ASK = Prompt("p", "What is 3 + 4?", {"answer": "7"})
CALL = write_call("calculate", {"expression": "3 + 4"})


async def play(*script, prompt=ASK, max_turns=None, **options):
    engine = ScriptedEngine(script)
    trajectory = await play_episode(
        group=ClaimedGroup("0", 0, prompt, (0,), 0),
        member=0,
        attempt=0,
        engine=engine,
        make_environment=build_environment_factory(
            EnvironmentConfig(kind="tools", options={"tools": ["calculate"], **options})
        ),
        scorer=build_scorer([RewardConfig(kind="exact_match")]),
        tokenizer=CodePointTokenizer(),
        sampling=SamplingParameters(1.0, 1000, 0),
        run_seed=0,
        wall_seconds=10,
        max_turns=max_turns,
    )
    shown = ["".join(map(chr, request.input_ids)) for request in engine.requests]
    return trajectory, shown


async def test_a_call_is_run_told_and_followed_by_the_answer():
    trajectory, shown = await play(CALL, "7")
    assert shown[0] == "tools: calculate\nuser: What is 3 + 4?\nassistant: "
    assert shown[1] == shown[0] + CALL + "\ntool: 7\nassistant: "
    assert (trajectory.reward, trajectory.counts) == (1.0, {"tool_calls": 1})
    assert [turn.finish_reason for turn in trajectory.turns] == [FinishReason.STOP] * 2


async def test_a_turn_without_a_call_is_the_answer():
    trajectory, _ = await play("8")
    assert (trajectory.reward, trajectory.counts, len(trajectory.turns)) == (0.0, {}, 1)


async def test_mistakes_are_told_to_the_policy_and_counted_by_kind():
    wrong = [write_call("divide", {}), write_call("calculate", {"expr": "1"}), "<tool_call>{</tool_call>"]
    trajectory, shown = await play("".join([*wrong, CALL]), "7")
    told = shown[1].split("tool: ")[1:]
    assert [text.split("\n")[0].split(":")[0] for text in told] == ["error", "error", "error", "7"]
    assert "no tool 'divide', only calculate" in told[0]
    assert "expression: Field required" in told[1]
    assert "not valid JSON" in told[2]
    assert trajectory.counts == {"failed_calls": 2, "malformed_calls": 1, "tool_calls": 1}
    assert trajectory.reward == 1.0


async def test_half_of_a_character_in_a_call_is_told_and_the_episode_goes_on():
    half = r'<tool_call>{"name": "calculate", "arguments": {"expression": "caf\ud83d"}}</tool_call>'
    trajectory, shown = await play(half, "7", tools=["calculate", "python"])
    assert "error: this call cannot be read: it holds half of a character" in shown[1]
    assert (trajectory.reward, trajectory.failure, trajectory.counts) == (1.0, None, {"malformed_calls": 1})


async def test_too_many_calls_in_one_turn_are_refused():
    trajectory, shown = await play(CALL * 3, "7", max_calls_per_turn=2)
    assert trajectory.counts == {"tool_calls": 2, "refused_calls": 1}
    assert "at most 2 calls" in shown[1]


async def test_a_policy_that_only_calls_ends_at_its_turn_budget():
    trajectory, _ = await play(CALL, CALL, CALL, max_turns=2)
    assert (trajectory.finish_reason, trajectory.reward) == (FinishReason.MAX_TURNS, 0.0)


async def test_llama_calls_are_understood_where_asked_for():
    trajectory, shown = await play(
        '{"name": "calculate", "parameters": {"expression": "3 + 4"}}', "7", call_format="llama", result_role="user"
    )
    assert shown[1].endswith("\nuser: 7\nassistant: ")
    assert trajectory.reward == 1.0


async def test_a_system_message_may_hold_the_schemas_unless_the_prompt_has_one():
    _, (shown,) = await play("7", system="Tools:\n{tools}")
    schema = json.loads(shown.split("Tools:\n")[1].split("\n")[0])
    assert schema["function"]["name"] == "calculate"
    own = Prompt("p", (Message("system", "mine"), Message("user", "?")), {"answer": "7"})
    _, (shown,) = await play("7", prompt=own, system="Tools:\n{tools}")
    assert shown == "tools: calculate\nsystem: mine\nuser: ?\nassistant: "


async def test_a_broken_tool_fails_the_episode_as_the_tools_fault(monkeypatch):
    def gone(expression: str) -> str:
        """Calculate."""
        raise ConnectionError("calculator is down")

    gone.__name__ = "calculate"
    monkeypatch.setattr("rollout.tools.calculator.calculate", gone)
    trajectory, _ = await play(CALL)
    assert (trajectory.failure.kind, trajectory.reward) == (FailureKind.TOOL, None)
    assert "calculator is down" in trajectory.failure.text


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tools": ["calcualte"]}, "did you mean calculate"),
        ({"tools": []}, "at least 1 item"),
        ({"tools": ["json:JSONDecodeError"]}, "must have `open` and `close`"),
        ({"tools": [{"kind": "search", "options": {"file": "x"}}]}, "path"),
        ({"call_format": "xml"}, "call_format"),
    ],
)
def test_wrong_options_are_refused_at_start(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        build_environment_factory(EnvironmentConfig(kind="tools", options={"tools": ["calculate"], **options}))


# ---- the recipe's data


def test_the_recipes_questions_are_all_different_and_answered_right():
    train, held_out = make_rows()
    assert (len(train), len(held_out)) == (142, 20)
    assert len({row["prompt"] for row in train + held_out}) == 162
    assert all(str(eval(row["prompt"])) == row["answer"] for row in train + held_out)


def test_the_clumsy_teacher_takes_the_wrong_operator_half_of_the_time():
    import random

    draw, rows = random.Random(0), make_rows()[0]
    dialogues = [clumsy_dialogue(row, draw) for row in rows * 10]
    right = sum(row["prompt"] in dialogue[1] for row, dialogue in zip(rows * 10, dialogues, strict=True)) / len(dialogues)
    assert 0.45 < right < 0.55
