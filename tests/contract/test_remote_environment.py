"""Environments behind HTTP: the reference server and its client, and what happens when either, or the line, fails."""

import asyncio
import contextlib
from collections import Counter

import aiohttp
import pytest
from aiohttp import web

from laminar.config.system import EnvironmentConfig
from laminar.types import ClaimedGroup, FailureKind, Message, Prompt, SamplingParameters
from rollout.boundary import EpisodeError
from rollout.environments.base import Observation, StepResult
from rollout.environments.factory import build_environment_factory
from rollout.environments.remote_wire import WireError, read_observation, read_prompt, read_step
from rollout.environments.serve import EnvironmentServer
from rollout.episode import play_episode
from rollout.rewards.scorer import RewardScorer
from rollout.scripted import CodePointTokenizer, ScriptedEngine


class World:
    """Asks until it hears "stop". `events` is what happened to all worlds; `troubles` what the next steps do instead."""

    events: list[str]
    troubles: list[object]

    async def reset(self, prompt):
        self.turn = 0
        self.events.append(f"reset {prompt.fields['n']}")
        return Observation((Message("user", prompt.content),), ({"function": {"name": "peek"}},))

    async def step(self, completion):
        self.turn += 1
        self.events.append(f"step {completion}")
        trouble = self.troubles.pop(0) if self.troubles else None
        if isinstance(trouble, Exception):
            raise trouble
        if trouble is not None:
            return await trouble()
        done = completion == "stop"
        terms, counts = {"turns": 0.5}, {"looks": 1}
        return StepResult(done, None if done else Observation(f"turn {self.turn}"), terms, counts)

    async def close(self):
        self.events.append("close")


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(World, "events", [], raising=False)
    monkeypatch.setattr(World, "troubles", [], raising=False)
    monkeypatch.setattr("rollout.environments.remote._FIRST_PAUSE_SECONDS", 0.001)
    return World


class Counting(EnvironmentServer):
    """Counts the calls that come, by name."""

    num_calls: Counter

    async def _answer(self, name, body):
        self.num_calls[name] += 1
        return await super()._answer(name, body)


@contextlib.asynccontextmanager
async def serving(**settings):
    server = Counting(World, **settings)
    server.num_calls = Counter()
    async with server.open() as url:
        yield server, url


async def play(url, *script, wall_seconds=30.0, **options):
    engine = ScriptedEngine(script)
    trajectory = await play_episode(
        group=ClaimedGroup("0", 0, Prompt("p", "Go.", {"n": 3}), (0,), 0),
        member=0,
        attempt=0,
        engine=engine,
        make_environment=build_environment_factory(EnvironmentConfig(kind="remote", options={"url": url, **options})),
        scorer=RewardScorer([]),
        tokenizer=CodePointTokenizer(),
        sampling=SamplingParameters(1.0, 100, 0),
        run_seed=0,
        wall_seconds=wall_seconds,
    )
    return trajectory, ["".join(map(chr, request.input_ids)) for request in engine.requests]


async def test_an_episode_on_a_server_is_played_as_one_at_home(world):
    async with serving() as (server, url):
        trajectory, seen = await play(url, "hm", "stop")
        assert server.num_open == 0
    assert world.events == ["reset 3", "step hm", "step stop", "close"]
    assert (trajectory.reward, trajectory.reward_terms, trajectory.counts) == (1.0, {"turns": 1.0}, {"looks": 2})
    assert seen[0] == "tools: peek\nuser: Go.\nassistant: "
    assert seen[1].endswith("hm\nuser: turn 1\nassistant: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "kind", "text"),
    [
        (RuntimeError("the disk is full"), FailureKind.ENVIRONMENT, "RuntimeError"),
        (EpisodeError(FailureKind.TOOL, "the browser is gone"), FailureKind.TOOL, "the browser is gone"),
        (lambda: asyncio.sleep(0, {"reward": 1}), FailureKind.USER_BUG, "cannot be sent"),
        (lambda: asyncio.sleep(30), FailureKind.ENVIRONMENT, "took longer than 0.05 s"),
    ],
)
async def test_what_fails_on_the_server_is_a_failure_with_its_kind(world, trouble, kind, text):
    world.troubles.append(trouble)
    async with serving(call_seconds=0.05) as (_, url):
        trajectory, _ = await play(url, "hm")
    assert (trajectory.reward, trajectory.failure.kind) == (None, kind)
    assert text in trajectory.failure.text
    assert world.events[-1] == "close"


async def test_a_call_whose_answer_was_lost_is_sent_again_and_runs_once(world):
    """The server is slower than one try; it goes on, and the next tries get its answer."""
    release = asyncio.Event()

    async def slow():
        await release.wait()
        return StepResult(done=True, reward_terms={"slow": 1.0})

    world.troubles.append(slow)
    async with serving() as (server, url), asyncio.timeout(30):
        playing = asyncio.create_task(play(url, "hm", call_seconds=0.2, retries=100))
        while server.num_calls["step"] < 3:
            await asyncio.sleep(0.005)
        release.set()
        trajectory, _ = await playing
    assert trajectory.reward_terms == {"slow": 1.0}
    assert world.events == ["reset 3", "step hm", "close"]


@pytest.mark.slow
async def test_a_server_that_may_run_a_call_twice_is_asked_once(world):
    world.troubles.append(lambda: asyncio.sleep(30))
    async with serving() as (_, url):
        trajectory, _ = await play(url, "hm", call_seconds=0.1, answers_once=False)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "failed 1 times" in trajectory.failure.text


@pytest.mark.slow
async def test_a_server_out_of_reach_is_a_failure_after_its_retries(world, unused_port):
    trajectory, _ = await play(f"http://127.0.0.1:{unused_port}", "hm", retries=2)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "failed 3 times" in trajectory.failure.text


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as held:  # bound and not listening: connections are refused
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.slow
async def test_the_episodes_wall_budget_ends_a_call_that_hangs_and_its_environment_is_closed(world):
    world.troubles.append(lambda: asyncio.sleep(60))
    async with serving() as (server, url):
        trajectory, _ = await play(url, "hm", wall_seconds=0.5)
        assert trajectory.failure.kind is FailureKind.TIMEOUT
        assert server.num_open == 0
    assert world.events == ["reset 3", "step hm", "close"]


@pytest.mark.slow
async def test_a_full_server_is_waited_for_and_one_that_forgot_the_episode_is_a_failure(world):
    async with serving(max_episodes=0) as (_, url):
        trajectory, _ = await play(url, "hm", retries=1)
        assert "failed 2 times; the last: _BusyError: status 503" in trajectory.failure.text
    async with serving() as (server, url):

        async def forget():
            for episode_id in list(server._episodes):
                asyncio.get_running_loop().call_soon(server._episodes.pop, episode_id, None)
            return StepResult(done=False, observation=Observation("?"))

        world.troubles.append(forget)
        trajectory, _ = await play(url, "hm", "hm")
    assert (trajectory.failure.kind, "is not open here" in trajectory.failure.text) == (FailureKind.ENVIRONMENT, True)


@pytest.mark.slow
async def test_an_episode_that_nobody_calls_is_closed(world):
    async with serving(idle_seconds=0.04) as (server, url), aiohttp.ClientSession() as http:
        body = {"id": "a", "number": 0, "prompt": {"content": "Go.", "fields": {"n": 1}}}
        async with http.post(f"{url}/reset", json=body) as response:
            assert response.status == 200
        async with asyncio.timeout(10):
            while server.num_open:
                await asyncio.sleep(0.005)
    assert world.events == ["reset 1", "close"]


async def post(url, name, body, token=""):
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/{name}", json=body, headers={"Authorization": f"Bearer {token}"}) as response,
    ):
        return response.status, await response.json()


async def test_a_repeated_call_gets_the_same_answer_and_one_out_of_order_none(world):
    reset = {"id": "a", "number": 0, "prompt": {"content": "Go.", "fields": {"n": 1}}}
    step = {"id": "a", "number": 1, "completion": "hm"}
    async with serving() as (_, url):
        first, again = await post(url, "reset", reset), await post(url, "reset", reset)
        assert first == again == (200, {"observation": {"content": [{"role": "user", "content": "Go."}],
                                                       "tools": [{"function": {"name": "peek"}}]}})  # fmt: skip
        assert await post(url, "step", step) == await post(url, "step", step)
        for wrong in ({**step, "number": 0}, {**step, "number": 3}, {**step, "number": None}, {"number": 1}):
            assert (await post(url, "step", wrong))[0] == 400
    assert world.events == ["reset 1", "step hm", "close"]


@pytest.mark.slow
async def test_a_token_is_asked_for(world, monkeypatch):
    monkeypatch.setenv("GAMES_TOKEN", "abc")
    async with serving(token="abc") as (_, url):
        trajectory, _ = await play(url, "stop", token_variable="GAMES_TOKEN")
        assert trajectory.reward == 0.5
        trajectory, _ = await play(url, "stop")
        assert "token is another one" in trajectory.failure.text


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["pear", "[]", '{"observation": 3}', '{"observation": {"content": [{"role": "x"}]}}'])
async def test_nonsense_from_a_server_is_said_to_be_that(world, answer):
    async def nonsense(request):
        return web.Response(text=answer)

    app = web.Application()
    app.router.add_post("/{name}", nonsense)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    trajectory, _ = await play(f"http://127.0.0.1:{runner.addresses[0][1]}", "hm")
    await runner.cleanup()
    assert trajectory.failure.kind is FailureKind.USER_BUG
    assert "answered nonsense" in trajectory.failure.text


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_prompt, {"content": 3}),
        (read_observation, {"content": "a", "tools": 3}),
        (read_step, {"done": "yes"}),
        (read_step, {"done": True, "reward_terms": [1]}),
    ],
)
def test_malformed_bodies_are_refused(read, body):
    with pytest.raises(WireError):
        read(body)
