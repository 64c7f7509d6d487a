"""Reward `judge` against a server that is right, busy, broken or talks nonsense: a verdict, or a failure of the verifier."""

import asyncio

import pytest
from aiohttp import web

from laminar.types import FailureKind, Message, Prompt
from rollout.boundary import EpisodeError
from rollout.rewards.base import RewardContext
from rollout.rewards.judge import Judge
from rollout.rewards.scorer import RewardScorer, Term

SCORES = {"good": "Fine. Score: 3, no:\nScore: 10", "fair": "score: 2.5", "odd": "Nice.", "high": "Score: 11"}


@pytest.fixture
async def server(monkeypatch):
    """Answers by what the question holds; `asked` are the bodies, `troubles` the statuses to answer first."""
    monkeypatch.setattr("rollout.rewards.judge._FIRST_PAUSE_SECONDS", 0.0)

    class Server:
        def __init__(self):
            self.asked, self.heads, self.troubles, self.gate = [], [], [], asyncio.Event()
            self.gate.set()

        async def answer(self, request):
            body = await request.json()
            self.asked.append(body)
            self.heads.append(request.headers.get("Authorization"))
            await self.gate.wait()
            if self.troubles:
                return web.Response(status=self.troubles.pop(0), text="trouble")
            text = body["messages"][0]["content"]
            verdict = next(verdict for word, verdict in SCORES.items() if word in text)
            return web.json_response({"choices": [{"message": {"content": verdict}}]})

    made = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield made
    await runner.cleanup()


def judge(server, **options):
    return Judge(Judge.Options(url=server.url, model="m", question="{question} {answer}", **options))


def context(answer, prompt=None):
    return RewardContext("t", prompt or Prompt("p", "Why?", {"answer": "because"}), answer)


async def test_the_last_score_counts_and_is_put_between_0_and_1(server):
    reward = judge(server)
    assert await reward.score(context("good")) == 1.0
    assert await reward.score(context("fair")) == 0.25
    assert server.asked[0] == {
        "model": "m", "messages": [{"role": "user", "content": "Why? good"}], "temperature": 0, "max_tokens": 512,
    }  # fmt: skip


async def test_question_reference_and_key_are_sent(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    options = Judge.Options(
        url=server.url + "/", model="m", question="{question}|{reference}|{answer}", api_key_variable="JUDGE_KEY"
    )
    prompt = Prompt("p", (Message("user", "Why?"),), {"answer": "because"})
    await Judge(options).score(context("good", prompt))
    assert server.asked[0]["messages"][0]["content"] == "user: Why?|because|good"
    assert server.heads == ["Bearer sesame"]


async def test_equal_questions_share_one_call_also_while_it_runs(server):
    reward = judge(server)
    server.gate.clear()
    tasks = [asyncio.create_task(reward.score(context("good"))) for _ in range(5)]
    while not server.asked:
        await asyncio.sleep(0)
    server.gate.set()
    assert await asyncio.gather(*tasks) == [1.0] * 5
    assert await reward.score(context("good")) == 1.0
    assert len(server.asked) == reward.num_calls == 1


async def test_a_call_ends_when_the_last_that_waits_for_it_is_gone(server):
    reward = judge(server)
    server.gate.clear()
    first, second = (asyncio.create_task(reward.score(context("good"))) for _ in range(2))
    while not server.asked:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert len(server.asked) == reward.num_calls == 1
    second.cancel()
    await asyncio.wait([second])
    server.gate.set()
    assert await reward.score(context("good")) == 1.0
    assert len(server.asked) == reward.num_calls == 2


async def test_the_wait_for_a_busy_judge_does_not_count_as_an_answers_time(server):
    server.gate.clear()
    scorer = RewardScorer([Term("judge", judge(server, max_running=1), timeout_seconds=1.0)])
    slow, waiting = (asyncio.create_task(scorer.score(context(answer))) for answer in ("good", "fair"))
    assert "took longer than 1 s" in (await slow).failure.text
    server.gate.set()
    assert (await waiting).reward == 0.25


async def test_the_oldest_verdict_is_forgotten_first(server):
    reward = judge(server, cache_size=1)
    for answer in ("good", "fair", "fair", "good"):
        await reward.score(context(answer))
    assert [body["messages"][0]["content"] for body in server.asked] == ["Why? good", "Why? fair", "Why? good"]


async def test_a_busy_server_is_asked_again(server):
    server.troubles = [503, 429, 500]
    assert await judge(server).score(context("good")) == 1.0
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("answer", "troubles", "options", "text", "num_calls"),
    [
        ("good", [503] * 9, {"retries": 2}, "failed 3 times; the last: OSError: status 503", 3),
        ("good", [401], {}, "answered 401", 1),
        ("odd", [], {}, "no score in range", 1),
        ("high", [], {}, "no score in range", 1),
        ("good", [503] * 9, {"max_calls": 2}, "max_calls = 2 is used up", 2),
    ],
)
async def test_what_cannot_be_judged_is_a_failure_of_the_verifier(server, answer, troubles, options, text, num_calls):
    server.troubles = list(troubles)
    reward = judge(server, **options)
    with pytest.raises(EpisodeError, match=text) as caught:
        await reward.score(context(answer))
    assert caught.value.failure.kind is FailureKind.VERIFIER
    assert len(server.asked) == num_calls


async def test_a_failure_is_not_kept_in_the_cache(server):
    server.troubles = [401]
    reward = judge(server)
    with pytest.raises(EpisodeError):
        await reward.score(context("good"))
    assert await reward.score(context("good")) == 1.0


async def test_a_judge_out_of_reach_is_a_failure_of_the_verifier(server):
    reward = Judge(Judge.Options(url="http://127.0.0.1:9/v1", model="m", retries=1))
    with pytest.raises(EpisodeError, match="failed 2 times") as caught:
        await reward.score(context("good"))
    assert caught.value.failure.kind is FailureKind.VERIFIER


@pytest.mark.parametrize("question", ["{question}", "{answer} {name}", "no place"])
def test_a_question_that_cannot_be_filled_is_refused(question):
    with pytest.raises(ValueError, match="must hold"):
        Judge.Options(url="http://x", model="m", question=question)


def test_a_prompt_without_the_reference_that_is_asked_for_is_refused_at_start():
    reward = Judge(Judge.Options(url="http://x", model="m", question="{reference} {answer}"))
    assert "answer" in reward.check_prompt(Prompt("p", "?"))
    assert reward.check_prompt(Prompt("p", "?", {"answer": "x"})) is None
