"""The gateway against the official clients: whole agents become trajectories; what fails is a failure with its kind."""

import asyncio
import json
import sys
from types import SimpleNamespace

import aiohttp
import pytest

from laminar.errors import EngineError
from laminar.types import ClaimedGroup, FailureKind, FinishReason, Message, Prompt, SamplingParameters
from rollout.agents import AgentPlayer
from rollout.environments.agent import Agent
from rollout.rewards.scorer import RewardScorer, Term
from rollout.scripted import CodePointTokenizer, ScriptedEngine
from rollout.tools.calls import write_call

GROUP = ClaimedGroup("00000003", 3, Prompt("p", "2 + 3?", {"answer": "5"}), (0,), 0)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
NO_REWARDS = RewardScorer([])


@pytest.fixture
async def play(monkeypatch):
    """Plays one trajectory with an agent; `gateway` is the server of the last one."""
    players = []

    async def run(
        agent,
        *script,
        scorer=NO_REWARDS,
        wall_seconds=30.0,
        command=(),
        max_new_tokens=1000,
        call_format="hermes",
        tokenizer=CodePointTokenizer,
        **settings,
    ):
        monkeypatch.setitem(sys.modules, "agent_of_the_test", SimpleNamespace(solve=agent))
        run = {"command": list(command)} if command else {"run": "agent_of_the_test:solve"}
        options = Agent.Options(call_format=call_format, **run)
        player = AgentPlayer(options, tokenizer(), scorer, wall_seconds, **settings)
        players.append(player)
        engine = ScriptedEngine(script)
        trajectory = await player.play(
            engine, GROUP, 0, 0, sampling=SamplingParameters(1.0, max_new_tokens, 0), run_seed=5, worker="rollout-0"
        )
        return trajectory, ["".join(map(chr, request.input_ids)) for request in engine.requests]

    yield run
    for player in players:
        await player.gateway.close()


def texts(trajectory):
    return ["".join(map(chr, chain.token_ids())) for chain in trajectory.chains]


async def post(task, path, body, key=None):
    async with (
        aiohttp.ClientSession() as session,
        session.post(task.base_url + path, json=body, headers={"x-api-key": key or task.api_key}) as response,
    ):
        return response.status, await response.json()


def question(task):
    return [{"role": "user", "content": task.prompt.content}]


# ---- official clients


@pytest.mark.slow  # the clients take seconds to import
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_openais_client_and_tools_is_a_trajectory(play, stream):
    from openai import AsyncOpenAI

    async def agent(task):
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            messages = question(task)
            while True:
                message = await ask(client, messages)
                messages.append(message)
                if not message.get("tool_calls"):
                    return float(message["content"] == task.prompt.fields["answer"])
                for call in message["tool_calls"]:
                    numbers = json.loads(call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(sum(numbers.values()))})

    async def ask(client, messages):
        wanted = {"model": "policy", "messages": messages, "tools": [TOOL]}
        if not stream:
            reply = await client.chat.completions.create(**wanted)
            return reply.choices[0].message.model_dump(exclude_none=True)
        message = {"role": "assistant", "content": "", "tool_calls": []}
        async for chunk in await client.chat.completions.create(**wanted, stream=True):
            delta = chunk.choices[0].delta
            message["content"] += delta.content or ""
            message["tool_calls"] += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
        return message

    trajectory, seen = await play(agent, "I add." + write_call("add", {"a": 2, "b": 3}), "5")
    (text,) = texts(trajectory)
    assert (trajectory.reward, trajectory.reward_terms, trajectory.failure) == (1.0, {"agent": 1.0}, None)
    assert text == seen[1] + "5"
    assert seen[1].startswith("tools: add\nuser: 2 + 3?\nassistant: I add.<tool_call>")
    assert seen[1].endswith("</tool_call>\ntool: 5\nassistant: ")
    assert int(trajectory.chains[0].mask().sum()) == trajectory.num_sampled_tokens
    assert [turn.chain for turn in trajectory.turns] == [0, 0]
    assert (trajectory.worker, trajectory.trajectory_id, trajectory.counts) == ("rollout-0", "00000003-000", {})


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_anthropics_client_and_tools_is_a_trajectory(play, stream):
    from anthropic import AsyncAnthropic

    tool = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}

    async def agent(task):
        async with AsyncAnthropic(base_url=task.base_url.removesuffix("/v1"), api_key=task.api_key) as client:
            messages = question(task)
            while True:
                wanted = {"model": "policy", "max_tokens": 200, "messages": messages, "tools": [tool], "system": "Be brief."}
                if stream:
                    async with client.messages.stream(**wanted) as events:
                        reply = await events.get_final_message()
                else:
                    reply = await client.messages.create(**wanted)
                messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
                uses = [block for block in reply.content if block.type == "tool_use"]
                if not uses:
                    assert reply.stop_reason == "end_turn"
                    return float(reply.content[0].text == "5")
                results = [
                    {"type": "tool_result", "tool_use_id": use.id, "content": str(sum(use.input.values()))} for use in uses
                ]
                messages.append({"role": "user", "content": results})

    trajectory, seen = await play(agent, "I add." + write_call("add", {"a": 2, "b": 3}), "5")
    assert trajectory.failure is None
    assert trajectory.reward == 1.0
    assert texts(trajectory) == [seen[1] + "5"]
    assert seen[0] == "tools: add\nsystem: Be brief.\nuser: 2 + 3?\nassistant: "
    assert seen[1].endswith("</tool_call>\ntool: 5\nassistant: ")


@pytest.mark.slow
async def test_completions_with_logprobs_and_the_list_of_models(play):
    from openai import AsyncOpenAI

    async def agent(task):
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            (model,) = [model.id async for model in client.models.list()]
            reply = await client.completions.create(model=model, prompt="2+3=", logprobs=1, max_tokens=2)
            chat = await client.chat.completions.create(model=model, messages=question(task), logprobs=True)
            assert reply.choices[0].logprobs.token_logprobs == [-1.0, -1.0]
            assert [token.token for token in chat.choices[0].logprobs.content] == ["5"]
            assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("5;", "length")
            assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 2)
            return {"right": 1.0, "style": 0.5}

    trajectory, _ = await play(agent, "5; and so on", "5")
    assert trajectory.failure is None
    assert trajectory.reward_terms == {"right": 1.0, "style": 0.5}
    assert len(trajectory.chains) == 2


# ---- rewards


async def test_a_reward_may_be_posted_or_computed_or_both(play):
    async def agent(task):
        await post(task, "/chat/completions", {"messages": question(task)})
        await post(task, "/reward", {"reward": 0.25})

    exact = RewardScorer([Term("right", lambda prompt, text: float(text == prompt.fields["answer"]))])
    trajectory, _ = await play(agent, "5", scorer=exact)
    assert (trajectory.reward, trajectory.reward_terms) == (1.25, {"right": 1.0, "agent": 0.25})


async def test_a_returned_number_takes_the_place_of_a_posted_one(play):
    async def agent(task):
        await post(task, "/chat/completions", {"messages": question(task)})
        await post(task, "/reward", {"terms": {"agent": 0.5, "style": 0.125}})
        return 0.25

    trajectory, _ = await play(agent, "5")
    assert (trajectory.reward, trajectory.reward_terms) == (0.375, {"agent": 0.25, "style": 0.125})


async def test_no_reward_and_no_call_are_user_bugs(play):
    async def silent(task):
        return 1.0

    async def without_reward(task):
        await post(task, "/chat/completions", {"messages": question(task)})

    async def nonsense(task):
        await post(task, "/chat/completions", {"messages": question(task)})
        return "good"

    for agent, text in ((silent, "without a call"), (without_reward, "gave a reward"), (nonsense, "one finite number")):
        trajectory, _ = await play(agent, "5")
        assert trajectory.failure.kind is FailureKind.USER_BUG
        assert text in trajectory.failure.text


# ---- what a reply shows


STOPPED = "Action: look\nObservation:"


@pytest.mark.parametrize(
    ("path", "stop", "read"),
    [
        ("/chat/completions", "stop", lambda body: body["choices"][0]["message"]["content"]),
        ("/messages", "stop_sequences", lambda body: body["content"][0]["text"]),
    ],
)
async def test_a_reply_is_shown_without_its_stop_text_and_its_chain_goes_on_behind_it(play, path, stop, read):
    async def agent(task):
        wanted = {"messages": question(task), "max_tokens": 100, stop: ["\nObservation:"]}
        _, body = await post(task, path, wanted)
        assert read(body) == "Action: look"
        assert body.get("stop_sequence", "\nObservation:") == "\nObservation:"
        messages = [*question(task), {"role": "assistant", "content": read(body)}, {"role": "user", "content": "rain"}]
        await post(task, path, wanted | {"messages": messages})
        return 1.0

    trajectory, seen = await play(agent, STOPPED + " sun", "ok")
    assert texts(trajectory) == [f"user: 2 + 3?\nassistant: {STOPPED}\nuser: rain\nassistant: ok"]
    assert seen[1] + "ok" == texts(trajectory)[0]
    assert trajectory.num_sampled_tokens == len(STOPPED + "ok")


async def test_of_two_replies_that_are_shown_alike_each_is_continued_in_its_own_chain(play):
    def asked(text, *more):
        return {"messages": [{"role": "user", "content": text}, *more], "max_tokens": 100}

    async def agent(task):
        stopping, more = {"stop": ["\nObservation:"]}, [{"role": "user", "content": "rain"}]
        _, cut = await post(task, "/chat/completions", asked("1") | stopping)
        _, whole = await post(task, "/chat/completions", asked("2"))
        told = [body["choices"][0]["message"] for body in (cut, whole)]
        assert [message["content"] for message in told] == ["Action: look", "Action: look"]
        await post(task, "/chat/completions", asked("1", told[0], *more))
        await post(task, "/chat/completions", asked("2", told[1], *more))
        return 1.0

    trajectory, _ = await play(agent, STOPPED + " sun", "Action: look", "ok", "well")
    assert texts(trajectory) == [
        f"user: 1\nassistant: {STOPPED}\nuser: rain\nassistant: ok",
        "user: 2\nassistant: Action: look\nuser: rain\nassistant: well",
    ]


async def test_raw_text_is_shown_without_its_stop_text_and_goes_on_where_the_agent_writes_it(play):
    async def agent(task):
        wanted = {"prompt": "Q: ", "stop": "\nObservation:"}
        _, body = await post(task, "/completions", wanted)
        assert body["choices"][0]["text"] == "Action: look"
        await post(task, "/completions", wanted | {"prompt": "Q: " + STOPPED + " rain\n"})
        return 1.0

    trajectory, _ = await play(agent, STOPPED + " sun", "ok")
    assert texts(trajectory) == [f"Q: {STOPPED} rain\nok"]


async def test_a_call_is_read_to_its_end_also_if_that_is_the_stop_text(play):
    async def agent(task):
        wanted = {"messages": question(task), "tools": [TOOL], "stop": "</tool_call>"}
        _, body = await post(task, "/chat/completions", wanted)
        message = body["choices"][0]["message"]
        assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("I add.", "add")
        return 1.0

    trajectory, _ = await play(agent, "I add." + write_call("add", {"a": 1}))
    assert trajectory.counts == {}


async def test_a_stream_of_a_chat_brings_the_logprobs(play):
    async def agent(task):
        wanted = {"messages": question(task), "logprobs": True, "stream": True}
        async with (
            aiohttp.ClientSession(headers={"x-api-key": task.api_key}) as session,
            session.post(task.base_url + "/chat/completions", json=wanted) as response,
        ):
            lines = [line[6:] async for line in response.content if line.startswith(b"data: {")]
        logprobs = [json.loads(line)["choices"][0]["logprobs"] for line in lines]
        assert [each["logprob"] for found in logprobs if found for each in found["content"]] == [-1.0, -1.0]
        return 1.0

    trajectory, _ = await play(agent, "AB")
    assert trajectory.reward == 1.0


# ---- what goes wrong


async def test_a_failing_engine_is_to_blame_not_the_agent_that_fails_with_it(play):
    async def agent(task):
        for _ in range(2):
            status, body = await post(task, "/chat/completions", {"messages": question(task)})
            assert (status, body["error"]["code"]) == (400, "trajectory_failed")
        raise RuntimeError("no answer")

    trajectory, seen = await play(agent, EngineError("it died"))
    assert trajectory.failure.kind is FailureKind.ENGINE
    assert len(seen) == 1


async def test_a_template_that_drifts_is_a_failure_if_it_is_held_to_be_strict_whatever_the_agent_makes_of_it(play):
    class Trims(CodePointTokenizer):
        def render(self, messages, tools=()):
            return "".join(f"{m['role']}: {m['content'].strip()}\n" for m in messages) + "assistant: "

    async def agent(task):
        _, body = await post(task, "/chat/completions", {"messages": question(task)})
        messages = [*question(task), body["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        status, _ = await post(task, "/chat/completions", {"messages": messages})
        assert status == 400
        return 0.0

    trajectory, _ = await play(agent, "A ", "B", tokenizer=Trims, strict_template=True)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "strict_template" in trajectory.failure.text


async def test_an_agent_that_raises_or_hangs_fails_in_time(play):
    async def raising(task):
        raise RuntimeError("browser crashed")

    async def hanging(task):
        await asyncio.Event().wait()

    trajectory, _ = await play(raising)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "browser crashed" in trajectory.failure.text
    trajectory, _ = await play(hanging, wall_seconds=0.1)
    assert (trajectory.failure.kind, trajectory.finish_reason) == (FailureKind.TIMEOUT, FinishReason.WALL_TIME)


async def test_an_agent_that_ends_on_a_spent_budget_is_judged_as_it_stands(play):
    async def agent(task):
        for _ in range(5):
            status, body = await post(task, "/chat/completions", {"messages": question(task)})
            if status != 200:
                assert body["error"]["code"] == "context_length_exceeded"
                raise RuntimeError("out of tokens")

    one = RewardScorer([Term("one", lambda prompt, text: 1.0)])
    trajectory, _ = await play(agent, "5", "6", scorer=one, max_turns=2)
    assert (trajectory.reward, trajectory.finish_reason, len(trajectory.turns)) == (1.0, FinishReason.MAX_TURNS, 2)


@pytest.mark.parametrize("num_calls", [2, 3], ids=["as many calls as may be", "one too many"])
async def test_an_agent_whose_last_answer_was_cut_is_truncated(play, num_calls):
    """Case D10: also if it tries a further call and the turns are what refuses it."""

    async def agent(task):
        for _ in range(num_calls):
            await post(task, "/chat/completions", {"messages": question(task)})
        return 1.0

    trajectory, _ = await play(agent, "5", "6789", max_turns=2, max_new_tokens=3)
    assert [turn.finish_reason for turn in trajectory.turns] == [FinishReason.STOP, FinishReason.LENGTH]
    assert (trajectory.reward, trajectory.is_truncated) == (1.0, True)


async def test_a_spent_budget_without_any_reward_says_what_to_catch(play):
    async def agent(task):
        for _ in range(2):
            status, _ = await post(task, "/chat/completions", {"messages": question(task)})
        raise RuntimeError(f"status {status}")

    trajectory, _ = await play(agent, "5", max_turns=1)
    assert trajectory.failure.kind is FailureKind.USER_BUG
    assert "catch code context_length_exceeded" in trajectory.failure.text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": []}, "not empty"),
        ({"messages": "hi"}, "not empty"),
        ({"messages": [{"content": "x"}]}, "no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "ask once for each"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "1 or more"),
        ({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}, "1 or more"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": 5}, "stop is 5; give a list"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 5}, "tools is 5; give a list"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": ["a"]}]}, "tool_calls is ['a']; give a list"),
        ([], "JSON object"),
    ],
)
async def test_a_call_that_cannot_be_answered_says_why(play, body, text):
    await refused(play, "/chat/completions", body, text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; give"),
        ({"max_tokens": "5"}, "max_tokens is '5'; give"),
        ({"stop_sequences": [""]}, "stop_sequences is ['']; give"),
        ({"stop_sequences": "xD"}, "stop_sequences is 'xD'; give"),
        ({"stop_sequences": [5]}, "stop_sequences is [5]; give"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text"),
        ({"messages": [{"role": "user"}]}, "malformed"),
        ({"tools": [{"name": "add"}]}, "malformed"),
    ],
)
async def test_a_call_in_anthropics_format_that_cannot_be_answered_says_why(play, changed, text):
    await refused(play, "/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9} | changed, text)


async def refused(play, path, body, text):
    async def agent(task):
        status, answer = await post(task, path, body)
        assert status == 400
        assert text in answer["error"]["message"]
        await post(task, "/chat/completions", {"messages": question(task)})
        return 1.0

    trajectory, _ = await play(agent, "5")
    assert trajectory.reward == 1.0


async def test_a_key_is_good_for_its_own_trajectory_and_only_while_it_runs(play):
    kept = []

    async def agent(task):
        kept.append(task)
        assert (await post(task, "/chat/completions", {"messages": question(task)}, key="laminar-other"))[0] == 401
        await post(task, "/chat/completions", {"messages": question(task)})
        return 1.0

    trajectory, _ = await play(agent, "5")
    assert trajectory.reward == 1.0
    assert (await post(kept[0], "/chat/completions", {"messages": question(kept[0])}))[0] == 401


async def test_a_malformed_call_of_a_tool_is_told_as_text_and_counted(play):
    async def agent(task):
        _, body = await post(task, "/chat/completions", {"messages": question(task), "tools": [TOOL]})
        message = body["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "<tool_call>{</tool_call>"}
        return 0.0

    trajectory, _ = await play(agent, "<tool_call>{</tool_call>")
    assert trajectory.counts == {"malformed_calls": 1}


@pytest.mark.parametrize("value", ["b'x'", "{1, 2}", "1j", "...", "{(1, 2): 3}"])
async def test_a_call_with_what_json_cannot_hold_is_a_malformed_call(play, value):
    async def agent(task):
        status, body = await post(task, "/chat/completions", {"messages": question(task), "tools": [TOOL]})
        assert (status, body["choices"][0]["message"]["content"]) == (200, f"[add(a={value})]")
        return 0.0

    trajectory, _ = await play(agent, f"[add(a={value})]", call_format="pythonic")
    assert trajectory.counts == {"malformed_calls": 1}


@pytest.mark.parametrize(("arguments", "num_chains"), [('{"b":2,"a":1.0}', 1), ('{"a": 777, "b": 2}', 2)])
async def test_a_call_that_the_agent_edits_begins_a_chain_and_one_that_it_writes_otherwise_does_not(
    play, arguments, num_chains
):
    async def agent(task):
        wanted = {"messages": question(task), "tools": [TOOL]}
        _, body = await post(task, "/chat/completions", wanted)
        message = body["choices"][0]["message"]
        message["tool_calls"][0]["function"]["arguments"] = arguments
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}
        await post(task, "/chat/completions", {**wanted, "messages": [*question(task), message, result]})
        return 0.0

    trajectory, _ = await play(agent, write_call("add", {"a": 1, "b": 2}), "ok")
    assert len(trajectory.chains) == num_chains


async def test_half_of_a_character_in_a_call_is_a_malformed_call(play):
    """UTF-8 cannot hold it, JSON may write it."""
    said = '<tool_call>{"name": "add", "arguments": {"x": "\\ud83d"}}</tool_call>'

    async def agent(task):
        status, body = await post(task, "/chat/completions", {"messages": question(task), "tools": [TOOL]})
        assert (status, body["choices"][0]["message"]["content"]) == (200, said)
        return 0.0

    trajectory, _ = await play(agent, said)
    assert trajectory.counts == {"malformed_calls": 1}


# ---- programs and plain functions


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def post(path, body):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + path
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)))
reply = post("/chat/completions", {"messages": [{"role": "user", "content": task["prompt"]}]})
answer = reply["choices"][0]["message"]["content"]
post("/reward", {"terms": {"right": float(answer == task["answer"])}})
"""


async def test_a_program_finds_its_key_in_the_environment_and_its_task_on_stdin(play):
    trajectory, _ = await play(None, "5", command=[sys.executable, "-I", "-c", PROGRAM])
    assert trajectory.failure is None
    assert trajectory.reward_terms == {"right": 1.0}


async def test_a_program_that_fails_is_told_by_its_last_words(play):
    trajectory, _ = await play(None, command=[sys.executable, "-I", "-S", "-c", "raise SystemExit('no browser')"])
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "no browser" in trajectory.failure.text


async def test_a_plain_function_runs_in_a_thread(play):
    import urllib.request

    def agent(task):
        body = json.dumps({"messages": question(task)}).encode()
        request = urllib.request.Request(task.base_url + "/chat/completions", body, {"x-api-key": task.api_key})
        return float(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])

    trajectory, _ = await play(agent, "0.5")
    assert trajectory.reward == 0.5


def test_either_a_function_or_a_program_is_needed():
    for options in ({}, {"run": "json:dumps", "command": ["x"]}):
        with pytest.raises(ValueError, match="either `run` or `command`"):
            Agent.Options(**options)


async def test_a_prompt_of_messages_is_handed_to_a_program_as_messages(play):
    from rollout.drivers import _as_json

    prompt = Prompt("p", (Message("user", "hi"),), {"answer": "5"})
    assert json.loads(_as_json(prompt)) == {"prompt_id": "p", "prompt": [{"role": "user", "content": "hi"}], "answer": "5"}
