"""Control of a live run: signed requests are obeyed once; what changes, changes for new groups only."""

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from laminar.cluster.control_desk import ControlDesk
from laminar.cluster.data import RunData
from laminar.cluster.live_settings import LiveSettings
from laminar.config.load import dump_toml, load_config
from laminar.config.root import LaminarConfig
from laminar.control import Request, Verb, answer_key, ask, ask_run, forget_requests, requests_key
from laminar.errors import ConfigError, RunNotAliveError
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.prompts import PromptPool
from laminar.experience.store import ExperienceStore
from laminar.run_folder import RunFolder, RunState
from laminar.telemetry.stream import TelemetryReader, TelemetryWriter
from laminar.types import Prompt, WeightVersion

TOKEN = "secret"


@pytest.fixture
async def desk(redis_client, run_id):
    """A served desk, and what it was told to do."""
    done = []

    async def note(arguments):
        done.append(dict(arguments))
        if arguments.get("key") == "bad":
            raise ConfigError("bad cannot be set; set good")
        if arguments.get("key") == "deep":
            raise RecursionError("too deep")
        if arguments.get("key") == "big":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if arguments.get("key") == "slow":
            raise TimeoutError
        return "done it"

    telemetry = TelemetryWriter(redis_client, run_id, "supervisor")
    actions = dict.fromkeys(Verb, note)
    served = ControlDesk(redis_client, run_id, TOKEN, actions, telemetry, lambda text: None, poll_seconds=0.005)
    task = asyncio.create_task(served.run())
    yield done
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_signed_request_is_obeyed_answered_and_told(desk, redis_client, run_id):
    answer = await ask(redis_client, run_id, Request.make(TOKEN, Verb.SET, {"key": "a", "value": "1"}, "test"))
    assert (answer, desk) == ("done it", [{"key": "a", "value": "1"}])
    (event,) = await TelemetryReader(redis_client, run_id).read()
    assert (event.kind, event.fields) == ("control", {"text": "done it", "verb": "set", "by": "test"})


async def test_a_refusal_comes_back_as_the_sentence_that_was_raised(desk, redis_client, run_id):
    with pytest.raises(ConfigError, match="bad cannot be set; set good"):
        await ask(redis_client, run_id, Request.make(TOKEN, Verb.SET, {"key": "bad"}, "test"))


async def test_a_request_that_nobody_thought_of_is_answered_and_does_not_end_the_desk(desk, redis_client, run_id):
    with pytest.raises(ConfigError, match=r"set failed: RecursionError\('too deep'\); the run's output has it whole"):
        await ask(redis_client, run_id, Request.make(TOKEN, Verb.SET, {"key": "deep"}, "test"))
    assert await ask(redis_client, run_id, Request.make(TOKEN, Verb.SET, {"key": "a"}, "test")) == "done it"


async def test_what_a_full_disk_prevents_is_answered(desk, redis_client, run_id):
    with pytest.raises(ConfigError, match=r"set failed: .*No space left on device; mend that, and ask again"):
        await ask(redis_client, run_id, Request.make(TOKEN, Verb.SET, {"key": "big"}, "test"))


async def test_an_error_that_says_nothing_is_answered_with_its_kind(desk, redis_client, run_id):
    with pytest.raises(ConfigError, match=r"set failed: TimeoutError; mend that, and ask again"):
        await ask(redis_client, run_id, Request.make(TOKEN, Verb.SET, {"key": "slow"}, "test"))


async def test_a_wrong_token_and_a_changed_argument_are_refused(desk, redis_client, run_id):
    genuine = Request.make(TOKEN, Verb.STOP, {"how": "drain"}, "test")
    forged = [
        Request.make("guess", Verb.STOP, {}, "test"),
        dataclasses.replace(genuine, arguments={"how": "now"}),
        dataclasses.replace(genuine, asked_at=genuine.asked_at + 1.0),
    ]
    for request in forged:
        with pytest.raises(ConfigError, match="not signed with the run's token"):
            await ask(redis_client, run_id, request)
        await redis_client.delete(answer_key(run_id, request.request_id))
    assert desk == []


async def test_a_request_that_is_sent_again_is_not_obeyed_again(desk, redis_client, run_id):
    request = Request.make(TOKEN, Verb.PAUSE, {}, "test")
    await ask(redis_client, run_id, request)
    await redis_client.delete(answer_key(run_id, request.request_id))
    with pytest.raises(ConfigError, match="obeyed already"):
        await ask(redis_client, run_id, request)
    assert len(desk) == 1


@pytest.mark.parametrize("seconds", [-120.0, 120.0])
async def test_a_request_of_another_time_is_refused_with_that_reason(desk, redis_client, run_id, seconds):
    plain = dataclasses.replace(Request.make(TOKEN, Verb.STOP, {}, "test"), asked_at=time.time() + seconds)
    request = dataclasses.replace(plain, signature=plain.signed_with(TOKEN))
    with pytest.raises(ConfigError, match=rf"made {-seconds:.0f} s ago by the supervisor's clock.*set the clocks"):
        await ask(redis_client, run_id, request)
    assert desk == []


async def test_what_was_asked_of_an_earlier_life_is_not_obeyed_by_the_next_whatever_the_clock_says(redis_client, run_id):
    await redis_client.rpush(requests_key(run_id), Request.make(TOKEN, Verb.STOP, {}, "test").to_json())
    await forget_requests(redis_client, run_id)
    assert not await redis_client.exists(requests_key(run_id))


@pytest.mark.parametrize("junk", [b"\xff\x00", b"[]", b"{}", b'{"verb": "dance"}', json.dumps({"verb": "stop"}).encode()])
async def test_what_is_no_request_is_passed_over(desk, redis_client, run_id, junk):
    await redis_client.rpush(requests_key(run_id), junk)
    assert await ask(redis_client, run_id, Request.make(TOKEN, Verb.STOP, {}, "test")) == "done it"


@pytest.mark.parametrize(
    "values",
    [
        {"asked_at": "now"}, {"signature": "\u00e9"}, {"signature": None}, {"arguments": {"how": 1}}, {"arguments": []},
        {"request_id": [1]}, {"more": 1},
    ],
)  # fmt: skip
def test_a_request_with_a_value_of_another_type_cannot_be_read(values):
    text = Request.make(TOKEN, Verb.STOP, {"how": "now"}, "test").to_json()
    assert Request.read(text.encode()).arguments == {"how": "now"}
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        Request.read(json.dumps({**json.loads(text), **values}).encode())


async def test_asking_a_run_that_nobody_serves_ends_by_its_deadline(redis_client, run_id):
    with pytest.raises(RunNotAliveError, match="did not answer within"):
        await ask(redis_client, run_id, Request.make(TOKEN, Verb.STOP, {}, "test"), seconds=0.05)


async def test_asking_a_run_that_has_ended_says_so(tmp_path):
    folder = RunFolder.create(tmp_path, "a")
    folder.write_state(RunState("the-run", TOKEN, 1, "finished"))
    with pytest.raises(RunNotAliveError, match="the-run is not alive"):
        await ask_run(folder, Verb.STOP, {}, "test")


class Crew:
    def __init__(self):
        self.limits = []

    async def limit_in_flight(self, num_groups):
        self.limits.append(num_groups)


@pytest.fixture
async def live(redis_client, run_id, tmp_path):
    """Settings of a living run with K = 1 and two groups a step, on a real data module."""

    async def make(**staleness):
        tree = {
            "model": {"path": "m"},
            "data": {"path": "d", "shuffle": False},
            "trainer": {"prompts_per_step": 2},
            "rollout": {"group_size": 2, "min_group_size": 1},
            "staleness": {"max_staleness": 1, **staleness},
        }
        config = LaminarConfig.model_validate(tree)
        folder = RunFolder.create(tmp_path, "a")
        folder.config.write_text(dump_toml(config))
        data = RunData([Prompt(str(i), "p") for i in range(20)], [])
        keeper, crew = SimpleNamespace(config=config, is_paused=False), Crew()
        await data.put_into_pool(redis_client, run_id, config)
        store = ExperienceStore(redis_client, run_id)
        await ExperienceBuffer(store).restore(0, 0)
        settings = LiveSettings(config, folder, redis_client, run_id, data, keeper, crew)
        return SimpleNamespace(
            settings=settings,
            folder=folder,
            keeper=keeper,
            crew=crew,
            pool=PromptPool(store),
            buffer=ExperienceBuffer(store),
        )

    return make


async def claim(run):
    return await run.pool.claim("w", WeightVersion(0, 0), 100, 60.0)


async def test_paused_rollouts_are_granted_nothing_until_they_are_unpaused(live):
    run = await live()
    await run.settings.pause({})
    paused = await claim(run)
    assert (paused.groups, paused.refused, run.keeper.is_paused) == ((), "paused", True)
    assert (await run.buffer.peek()).is_paused
    await run.settings.unpause({})
    assert len((await claim(run)).groups) == 4  # (K + 1) * B


async def test_a_looser_bound_admits_more_and_groups_keep_theirs(live):
    run = await live()
    assert len((await claim(run)).groups) == 4
    await run.settings.set({"key": "staleness.max_staleness", "value": "3"})
    assert len((await claim(run)).groups) == 4  # up to (3 + 1) * 2
    snapshot = await run.buffer.peek()
    assert Counter(header.max_staleness for header in snapshot.headers) == {1: 4, 3: 4}
    assert snapshot.max_staleness == 3
    assert run.keeper.config.staleness.max_staleness == 3
    assert load_config(run.folder.config).staleness.max_staleness == 3


async def test_a_tighter_bound_holds_back_new_groups_only(live):
    run = await live(max_staleness=3)
    assert len((await claim(run)).groups) == 8
    await run.settings.set({"key": "staleness.max_staleness", "value": "1"})
    assert (await claim(run)).refused == "staleness"
    assert {header.max_staleness for header in (await run.buffer.peek()).headers} == {3}


@pytest.mark.parametrize("key", ["staleness.max_staleness", "rollout.max_in_flight_groups"])
async def test_what_cannot_be_written_for_a_resume_is_not_set_either(live, disk_limit, key):
    run = await live()
    before = run.folder.config.read_text()
    with disk_limit(100), pytest.raises(OSError, match="too large"):
        await run.settings.set({"key": key, "value": "3"})
    assert run.folder.config.read_text() == before
    assert ((await run.buffer.peek()).max_staleness, run.keeper.config.staleness.max_staleness) == (1, 1)
    assert run.crew.limits == []


async def test_the_in_flight_limit_reaches_workers_and_the_config_of_later_ones(live):
    run = await live()
    assert "64 -> 9" in await run.settings.set({"key": "rollout.max_in_flight_groups", "value": "9"})
    assert run.crew.limits == [9]
    assert load_config(run.folder.config).rollout.max_in_flight_groups == 9


@pytest.mark.parametrize(
    ("staleness", "key", "value", "words"),
    [
        ({}, "trainer.learning_rate", "1e-6", "only staleness.max_staleness and rollout.max_in_flight_groups"),
        ({}, "staleness.max_staleness", "-1", "max_staleness"),
        ({}, "staleness.max_staleness", "0", "only between bounds of 1 or more"),
        ({"max_staleness": 0}, "staleness.max_staleness", "2", "only between bounds of 1 or more"),
        (
            {},
            "staleness.max_staleness",
            "unbounded",
            "from 1 to unbounded in a living run: only between bounds of 1 or more",
        ),
        ({"max_staleness": "unbounded"}, "staleness.max_staleness", "2", "from unbounded to 2"),
        ({"policy": "mask"}, "staleness.max_staleness", "2", "not with staleness.policy"),
        ({}, "rollout.max_in_flight_groups", "many", "max_in_flight_groups"),
    ],
)
async def test_what_the_core_cannot_honour_is_refused_and_changes_nothing(live, staleness, key, value, words):
    run = await live(**staleness)
    before = run.folder.config.read_text()
    with pytest.raises(ConfigError, match=words):
        await run.settings.set({"key": key, "value": value})
    assert run.folder.config.read_text() == before
    assert run.crew.limits == []
