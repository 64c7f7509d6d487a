"""Runs an emulated engine in an event loop, its steps taking as long as a real engine's would, divided by the time factor.

A step covers many tokens, but nobody has to wait for its end: whoever comes, goes, or commands in its midst finds everybody
with the tokens that are due by then, and a new step begins at that token boundary. So times are exact to one token, at the
price of one wake-up for each event; readers of streams hear of `stream_interval` tokens at once (as in SGLang).
Invariants: commands run at a token boundary, in the order of the calls; steps begin where the last one was due to end, so
that time lost by a busy machine is made up for, and what could not be is counted (`lag_seconds`).
Many engines share one event loop. It knows neither HTTP nor how long a step takes.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from rollout.engines.book import EngineBook
from rollout.engines.door import Reader, Readers, Update, hand_over
from rollout.engines.emulated_engine import EmulatedEngine
from rollout.engines.wire import EngineLoad, GenerateWire

Result = TypeVar("Result")
ROUNDING = 1e-6
"""A timer that rings at a boundary must find it past."""


class EmulatedLoop:
    """One engine's steps.

    Args:
        engine: not used elsewhere from now on.
        time_factor: seconds of the real engine in one second.
        on_crash: called if a step fails of a bug.
        max_arrears_seconds: how far a busy machine may fall behind before the lost time is given up.
        stream_interval: tokens that a stream's reader hears of at once.
    """

    def __init__(
        self,
        engine: EmulatedEngine,
        time_factor: float,
        on_crash: Callable[[BaseException], None] = lambda error: None,
        *,
        max_arrears_seconds: float = 1.0,
        stream_interval: int = 1,
    ) -> None:
        self._engine, self._time_factor, self._max_arrears = engine, time_factor, max_arrears_seconds
        self._readers = Readers(stream_interval)
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.Future[None] = self._loop.create_future()
        self._boundary = self._loop.time()
        """When the last token boundary was due; during a prefill, when that ends."""
        self._token_seconds, self._left = 0.0, 0
        self.lag_seconds = 0.0
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(lambda task: _tell(task, on_crash))

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return not self._task.done()

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return self._engine.load()

    async def stop(self) -> None:
        """End it as a kill would: nothing is answered any more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def call(self, function: Callable[[EngineBook[Any]], Result]) -> Result:
        """Run `function` at the present token boundary."""
        self._give_due_tokens()
        result = function(self._engine.book)
        self._deliver()
        self._interrupt()
        return result

    async def generate(self, wire: GenerateWire) -> "asyncio.Queue[Update]":
        """Queue a request; what becomes of it.

        Raises:
            LaminarError: if the engine refuses it.
        """
        reader = Reader(asyncio.Queue(), wire.stream)
        self._give_due_tokens()
        self._engine.add(wire)
        self._readers.add(wire.rid, reader)
        self._interrupt()
        return reader.updates

    async def _run(self) -> None:
        """Step after step. Waits for: work, then for a step's time. Unblocked by: requests, commands."""
        while True:
            if not self._engine.book.has_work:
                await self._wait(None)  # as long as the engine lives: an idle one has no deadline
                self._boundary = self._loop.time()
                continue
            step = self._engine.begin()
            self._catch_up(self._loop.time())
            self._boundary += step.prefill_seconds / self._time_factor
            self._token_seconds, self._left = step.token_seconds / self._time_factor, step.num_tokens
            await self._wait(self._boundary + self._left * self._token_seconds)
            self._give_due_tokens()

    def _catch_up(self, now: float) -> None:
        """Make up for lost time by steps that take none, up to a limit."""
        if (given_up := now - self._boundary - self._max_arrears) > 0:
            self.lag_seconds += given_up
            self._boundary += given_up

    async def _wait(self, until: float | None) -> None:
        self._alarm = self._loop.create_future()
        timer = None if until is None else self._loop.call_at(until, self._interrupt)
        try:
            await self._alarm
        finally:
            if timer is not None:
                timer.cancel()

    def _interrupt(self) -> None:
        if not self._alarm.done():
            self._alarm.set_result(None)

    def _give_due_tokens(self) -> None:
        """Bring everybody up to the last token boundary that is past."""
        if not self._left:
            return
        past = int((self._loop.time() - self._boundary) / self._token_seconds + ROUNDING)
        if (count := min(self._left, past)) > 0:
            self._left -= count
            self._boundary += count * self._token_seconds
            self._engine.end(count)
            self._deliver()

    def _deliver(self) -> None:
        if updates := self._readers.updates(self._engine.book.report(), self._engine.book.version):
            hand_over(updates)


def _tell(task: "asyncio.Task[None]", on_crash: Callable[[BaseException], None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        on_crash(error)
