"""Groups that become ready while a step trains are here when the next batch is chosen; nothing else changes."""

import asyncio

import pytest

from laminar.errors import ExperienceError
from laminar.types import EvictionReason
from trainer import prefetch
from trainer.prefetch import Prefetcher

pytestmark = pytest.mark.heavy


class CountingBuffer:
    """The real buffer, and what was read of it; broken for as long as that is asked for."""

    def __init__(self, buffer):
        self.buffer, self.read, self.is_broken = buffer, [], False

    async def peek(self):
        if self.is_broken:
            raise ExperienceError("the server is away")
        return await self.buffer.peek()

    async def fetch(self, group_ids):
        groups = await self.buffer.fetch(group_ids)
        self.read += group_ids
        return groups


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
async def world(make_run, monkeypatch):
    monkeypatch.setattr(prefetch, "LOOK_SECONDS", 0.002)
    run = await make_run(prompts_per_step=2, max_staleness=3)
    buffer = CountingBuffer(run.buffer)
    prefetcher = Prefetcher(buffer)
    running = asyncio.create_task(prefetcher.run())
    yield run, buffer, prefetcher
    prefetcher.end()
    await asyncio.wait_for(running, 10)


async def test_what_becomes_ready_meanwhile_is_read_once(world):
    run, buffer, prefetcher = world
    with prefetcher.ahead(()):
        names = await run.ready(groups=3)
        await until(lambda: len(buffer.read) == 3)
    groups = await prefetcher.fetch(names)
    assert [group[0].group_id for group in groups] == names
    assert sorted(buffer.read) == sorted(names)


async def test_what_the_sampler_has_is_not_read_again_and_what_was_let_go_is_forgotten(world):
    run, buffer, prefetcher = world
    names = await run.ready(groups=3)
    with prefetcher.ahead({names[0]}):
        await until(lambda: len(buffer.read) == 2)
        await run.buffer.evict([names[1]], EvictionReason.STALE, reissue=False)
        await until(lambda: set(prefetcher._groups) == {names[2]})
    assert names[0] not in buffer.read


async def test_a_server_that_is_away_stops_nothing(world):
    run, buffer, prefetcher = world
    buffer.is_broken = True
    with prefetcher.ahead(()):
        names = await run.ready(groups=1)
        await asyncio.sleep(0.01)
        assert buffer.read == []
        buffer.is_broken = False
        await until(lambda: buffer.read == names)


async def test_without_a_head_start_all_is_read_at_once(world):
    run, buffer, prefetcher = world
    names = await run.ready(groups=2)
    assert len(await prefetcher.fetch(names)) == 2
    assert buffer.read == names
