"""The engine's thread outlives those who ask it."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from rollout.engines.book import StepReport
from rollout.engines.engine_loop import EngineLoop


class Engine:
    """Always has work; a step takes until it is let go."""

    def __init__(self):
        self.book = SimpleNamespace(has_work=True, version="0.0")
        self.stepping, self.letting_go = threading.Event(), threading.Event()

    def load(self):
        return None

    def step(self):
        self.stepping.set()
        assert self.letting_go.wait(20)
        return StepReport()


async def test_a_caller_that_leaves_before_the_next_token_boundary_is_not_served_and_ends_nothing():
    engine, crashes, served = Engine(), [], []
    loop = EngineLoop(engine, asyncio.get_running_loop(), crashes.append)
    await asyncio.to_thread(engine.stepping.wait, 20)
    leaving = asyncio.create_task(loop.call(lambda book: served.append("who left")))
    await asyncio.sleep(0)  # it has asked, and waits
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    engine.letting_go.set()
    async with asyncio.timeout(20):
        await loop.call(lambda book: served.append("who stayed"))
    assert (served, crashes, loop.alive) == (["who stayed"], [], True)
    loop.stop()
