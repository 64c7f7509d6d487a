"""Calls become chains: what continues a known history keeps its ids, whatever else begins a chain of its own."""

import asyncio

import pytest

from laminar.types import FinishReason, SamplingParameters
from rollout.conversations import BadCallError, Conversations, SpentError
from rollout.scripted import CodePointTokenizer, ScriptedEngine


def conversations(*script, max_new_tokens=1000, **settings):
    engine = ScriptedEngine(script)
    return Conversations(engine, CodePointTokenizer(), SamplingParameters(1.0, max_new_tokens, 7), **settings), engine


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def texts(calls):
    """Every chain with what was sampled in brackets."""
    shown = []
    for chain in calls.chains():
        parts = ["".join(map(chr, s.token_ids)) for s in chain.segments]
        shown.append("".join(f"[{p}]" if s.is_sampled else p for p, s in zip(parts, chain.segments, strict=True)))
    return shown


def seen(engine):
    return ["".join(map(chr, request.input_ids)) for request in engine.requests]


async def test_a_continued_history_is_one_chain_and_its_ids_are_what_the_engine_saw():
    calls, engine = conversations("A", "B")
    first = await calls.chat([user("1")])
    await calls.chat([user("1"), said(first.text), user("2")])
    assert texts(calls) == ["user: 1\nassistant: [A]\nuser: 2\nassistant: [B]"]
    assert seen(engine)[1] == "user: 1\nassistant: A\nuser: 2\nassistant: "
    assert [(t.chain, t.start, t.end) for t in calls.turns()] == [(0, 19, 20), (0, 40, 41)]
    assert calls.counts == {}


@pytest.mark.parametrize(
    "history",
    [
        [user("1"), said("a"), user("2")],
        [user("one"), said("A"), user("2")],
        [user("2")],
        [{"role": "system", "content": "s"}, user("1"), said("A"), user("2")],
    ],
    ids=["an edited reply", "an edited question", "a forgotten history", "a new system message"],
)
async def test_a_rewritten_history_is_a_chain_of_its_own_with_nothing_old_trained(history):
    calls, engine = conversations("A", "B")
    await calls.chat([user("1")])
    await calls.chat(history)
    first, second = texts(calls)
    assert first == "user: 1\nassistant: [A]"
    assert second == seen(engine)[1] + "[B]"
    assert [turn.chain for turn in calls.turns()] == [0, 1]
    assert calls.counts == {"branched_contexts": 1}


async def test_branches_from_one_history_are_chains_of_their_own_and_each_can_go_on():
    calls, _ = conversations("A", "B", "C", "D")
    await calls.chat([user("1")])
    root = [user("1"), said("A")]
    await calls.chat([*root, user("2")])
    await calls.chat([*root, user("3")])
    await calls.chat([*root, user("3"), said("C"), user("4")])
    assert texts(calls) == [
        "user: 1\nassistant: [A]\nuser: 2\nassistant: [B]",
        "user: 1\nassistant: A\nuser: 3\nassistant: [C]\nuser: 4\nassistant: [D]",
    ]
    assert [turn.chain for turn in calls.turns()] == [0, 0, 1, 1]


async def test_other_tools_are_another_context():
    calls, _ = conversations("A", "B")
    tool = {"type": "function", "function": {"name": "add"}}
    await calls.chat([user("1")])
    await calls.chat([user("1"), said("A"), user("2")], [tool])
    assert len(calls.chains()) == 2


async def test_the_same_question_asked_again_is_answered_with_other_noise():
    calls, engine = conversations("A", "B")
    await asyncio.gather(calls.chat([user("1")]), calls.chat([user("1")]))
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds == [7, 8]
    assert texts(calls) == ["user: 1\nassistant: [A]", "user: 1\nassistant: [B]"]


async def test_of_two_replies_of_the_same_text_the_one_that_was_told_last_is_continued_first():
    calls, _ = conversations("A", "A", "B", "C")
    await calls.chat([user("1")])
    await calls.chat([user("1")])
    await calls.chat([user("1"), said("A"), user("2")])
    await calls.chat([user("1"), said("A"), user("3")])
    assert texts(calls) == [
        "user: 1\nassistant: [A]\nuser: 3\nassistant: [C]",
        "user: 1\nassistant: [A]\nuser: 2\nassistant: [B]",
    ]


async def test_a_message_that_may_stand_for_several_is_read_as_a_line_has_it_and_else_as_it_stands():
    calls, _ = conversations("A!", "B", "C")
    await calls.chat([user("1")])
    history, alike = [user("1"), said("A"), user("2")], {1: [said("A!"), said("A?")]}
    await calls.chat(history, alike=alike)
    await calls.chat([*history[:-1], user("3")], alike=alike)
    assert texts(calls) == [
        "user: 1\nassistant: [A!]\nuser: 2\nassistant: [B]",
        "user: 1\nassistant: A\nuser: 3\nassistant: [C]",
    ]


async def test_raw_text_is_continued_by_its_own_end():
    calls, engine = conversations("b", "d", "z")
    await calls.complete("a")
    await calls.complete("abc")
    await calls.complete("x")
    assert texts(calls) == ["a[b]c[d]", "x[z]"]
    assert seen(engine) == ["a", "abc", "x"]


async def test_one_call_is_held_to_its_own_limit_and_all_to_the_trajectorys():
    calls, engine = conversations("abcdef", "abcdef", max_new_tokens=5)
    first = await calls.chat([user("1")], max_new_tokens=2)
    assert (first.text, first.finish_reason) == ("ab", FinishReason.LENGTH)
    second = await calls.chat([user("1"), said("ab"), user("2")])
    assert second.text == "abc"
    with pytest.raises(SpentError):
        await calls.chat([user("3")])
    assert calls.spent is FinishReason.MAX_TOKENS
    assert [request.sampling.max_new_tokens for request in engine.requests] == [2, 3]


async def test_the_turn_budget_and_the_length_of_a_trajectory_hold_over_all_chains():
    calls, _ = conversations("A", max_turns=1)
    await calls.chat([user("1")])
    with pytest.raises(SpentError):
        await calls.chat([user("2")])
    assert calls.spent is FinishReason.MAX_TURNS
    calls, _ = conversations("A", "B", max_tokens=40)
    await calls.chat([user("1")])
    with pytest.raises(SpentError):
        await calls.chat([user("a question that is too long")])
    assert calls.spent is FinishReason.MAX_TOKENS
    assert sum(chain.num_tokens for chain in calls.chains()) <= 40


async def test_a_call_may_bring_its_own_stop_text():
    calls, _ = conversations("abcXdef")
    reply = await calls.chat([user("1")], stop=["X"])
    assert (reply.text, reply.finish_reason, len(reply.logprobs)) == ("abcX", FinishReason.STOP, 4)


async def abandon(call, engine, monkeypatch):
    """Give a call up while the engine works on it."""
    begun = asyncio.Event()

    async def never(*_arguments):
        begun.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "generate", never)
        task = asyncio.create_task(call)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_call_that_was_given_up_and_is_made_again_goes_on_in_the_same_chain(monkeypatch):
    calls, engine = conversations("A", "B", max_tokens=60)
    await abandon(calls.chat([user("1")]), engine, monkeypatch)
    first = await calls.chat([user("1")])
    history = [user("1"), said(first.text), user("2")]
    await abandon(calls.chat(history), engine, monkeypatch)
    await calls.chat(history)
    assert texts(calls) == ["user: 1\nassistant: [A]\nuser: 2\nassistant: [B]"]
    assert [(t.chain, t.start, t.end) for t in calls.turns()] == [(0, 19, 20), (0, 40, 41)]
    assert calls.counts == {}


class ForgetfulTokenizer(CodePointTokenizer):
    """Shows earlier replies as a dash, so every later call rewrites its history."""

    def render(self, messages, *arguments, **settings):
        last = max(place for place, message in enumerate(messages) if message["role"] == "user")
        shown = [
            {**message, "content": "-"} if message["role"] == "assistant" and place < last else message
            for place, message in enumerate(messages)
        ]
        return super().render(shown, *arguments, **settings)


async def test_a_call_that_was_given_up_counts_no_rewritten_context(monkeypatch):
    engine = ScriptedEngine(["A", "B"])
    calls = Conversations(engine, ForgetfulTokenizer(), SamplingParameters(1.0, 1000, 7))
    first = await calls.chat([user("1")])
    history = [user("1"), said(first.text), user("2")]
    for _ in range(2):
        await abandon(calls.chat(history), engine, monkeypatch)
    await calls.chat(history)
    assert calls.counts == {"rewritten_contexts": 1}


async def test_raw_text_that_was_given_up_and_is_asked_again_goes_on_in_the_same_chain(monkeypatch):
    calls, engine = conversations("A", "B")
    first = await calls.complete("1")
    await abandon(calls.complete("1" + first.text + "2"), engine, monkeypatch)
    await calls.complete("1" + first.text + "2")
    assert texts(calls) == ["1[A]2[B]"]
    assert calls.counts == {}


async def test_a_branch_that_was_given_up_leaves_nothing_behind(monkeypatch):
    calls, engine = conversations("A", "B")
    await calls.chat([user("1")])
    await abandon(calls.chat([user("2")]), engine, monkeypatch)
    assert (texts(calls), calls.counts) == (["user: 1\nassistant: [A]"], {})


async def test_an_empty_prompt_is_refused():
    calls, _ = conversations("a")
    with pytest.raises(BadCallError, match="empty"):
        await calls.complete("")


async def test_raw_text_continues_the_longest_beginning_that_was_sampled():
    for replies in (["4", "42", "!"], ["42", "4", "!"]):
        calls, _ = conversations(*replies)
        for prompt in ("Q", "Q", "Q42 and"):
            await calls.complete(prompt)
        assert sorted(texts(calls)) == ["Q[42] and[!]", "Q[4]"]


async def test_raw_text_asked_again_begins_anew_also_after_an_empty_reply():
    class Ends(CodePointTokenizer):
        def decode(self, token_ids, *, keep_special=False):
            text = super().decode(token_ids)
            return text if keep_special else text.replace("$", "")

    engine = ScriptedEngine(["$", "answer$", "more$", "longer$"])
    calls = Conversations(engine, Ends(), SamplingParameters(1.0, 100, 7))
    for prompt in ("Q", "Q", "Qanswer", "Q?"):
        await calls.complete(prompt)
    assert seen(engine) == ["Q", "Q", "Qanswer", "Q?"]


async def test_a_call_that_was_not_the_policys_own_counts_as_history():
    def called(argument):
        function = {"name": "f", "arguments": {"x": argument}}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}

    for argument, num_chains in ((1, 1), (2, 2)):
        calls, _ = conversations("A", "B")
        await calls.chat([user("1"), called(1)])
        await calls.chat([user("1"), called(argument), said("A"), user("2")])
        assert len(calls.chains()) == num_chains


async def test_a_call_that_is_too_long_leaves_room_for_a_shorter_one():
    calls, _ = conversations("A", max_tokens=60)
    with pytest.raises(SpentError):
        await calls.chat([user("x" * 60)])
    assert calls.spent is FinishReason.MAX_TOKENS
    assert (await calls.chat([user("short")])).text == "A"
    assert calls.spent is None


async def test_behind_a_call_that_is_too_long_a_shorter_one_continues_the_same_chain():
    calls, _ = conversations("A", "B", max_tokens=50)
    await calls.chat([user("1")])
    with pytest.raises(SpentError):
        await calls.chat([user("1"), said("A"), user("2" * 50)])
    await calls.chat([user("1"), said("A"), user("2")])
    assert texts(calls) == ["user: 1\nassistant: [A]\nuser: 2\nassistant: [B]"]
    calls, _ = conversations("A", "B", max_tokens=20)
    await calls.complete("a ")
    with pytest.raises(SpentError):
        await calls.complete("a A" + "2" * 20)
    await calls.complete("a A2")
    assert texts(calls) == ["a [A]2[B]"]
