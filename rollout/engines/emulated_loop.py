"""Runs an emulated engine in an event loop, its steps taking as long as a real engine's would, divided by the time factor.

Invariants: commands run between steps, in the order of the calls; steps begin where the last one was due to end, so that
time lost by a busy machine is made up for, and what could not be is counted (`lag_seconds`).
Many engines share one event loop. It knows neither HTTP nor how long a step takes.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from rollout.engines.door import Engine, Reader, Readers, Update, hand_over
from rollout.engines.emulated_engine import EmulatedEngine
from rollout.engines.wire import EngineLoad, GenerateWire

Result = TypeVar("Result")


class EmulatedLoop:
    """One engine's steps.

    Args:
        engine: not used elsewhere from now on.
        time_factor: seconds of the real engine in one second.
        on_crash: called if a step fails of a bug.
        max_arrears_seconds: how far a busy machine may fall behind before the lost time is given up.
    """

    def __init__(
        self,
        engine: EmulatedEngine,
        time_factor: float,
        on_crash: Callable[[BaseException], None] = lambda error: None,
        *,
        max_arrears_seconds: float = 1.0,
    ) -> None:
        self._engine, self._time_factor, self._max_arrears = engine, time_factor, max_arrears_seconds
        self._readers = Readers()
        self._work = asyncio.Event()
        self._due = 0.0
        self.lag_seconds = 0.0
        self._task = asyncio.get_running_loop().create_task(self._run())
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

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run `function` now: nothing but a whole step changes the engine."""
        result = function(self._engine)
        self._deliver()
        self._work.set()
        return result

    async def generate(self, wire: GenerateWire) -> "asyncio.Queue[Update]":
        """Queue a request; what becomes of it.

        Raises:
            LaminarError: if the engine refuses it.
        """
        reader = Reader(asyncio.Queue(), wire.stream)
        self._engine.add(wire)
        self._readers.add(wire.rid, reader)
        self._work.set()
        return reader.updates

    async def _run(self) -> None:
        """Step after step. Waits for: work, then for a step's time. Unblocked by: requests, the end of a pause."""
        while True:
            if not self._engine.has_work:
                self._work.clear()
                await self._work.wait()  # as long as the engine lives: an idle one has no deadline
                self._due = time.monotonic()
                continue
            self._due += self._engine.begin() / self._time_factor
            now = time.monotonic()
            if now - self._due > self._max_arrears:
                self.lag_seconds += now - self._due - self._max_arrears
                self._due = now - self._max_arrears
            await asyncio.sleep(self._due - now)
            self._engine.end()
            self._deliver()

    def _deliver(self) -> None:
        if updates := self._readers.updates(self._engine.report(), self._engine.version):
            hand_over(updates)


def _tell(task: "asyncio.Task[None]", on_crash: Callable[[BaseException], None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        on_crash(error)
