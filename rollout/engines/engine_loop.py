"""The engine's own thread, and the door to it for an event loop.

Invariants: the engine is touched by its thread only; a command runs at a token boundary, in the order of the calls; the
event loop hears once a step what changed; while there is nothing to do the thread sleeps. This module knows neither HTTP
nor models.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from laminar.errors import LaminarError
from rollout.engines.book import EngineBook, StepReport
from rollout.engines.door import Reader, Readers, Update, hand_over
from rollout.engines.torch_engine import TorchEngine
from rollout.engines.wire import EngineLoad, GenerateWire

Result = TypeVar("Result")


class EngineLoop:
    """Runs a `TorchEngine` in a thread.

    Args:
        engine: made elsewhere, not used elsewhere from now on.
        loop: where readers live.
        on_crash: called in the event loop if the thread dies of a bug.
    """

    def __init__(
        self, engine: TorchEngine, loop: asyncio.AbstractEventLoop, on_crash: Callable[[BaseException], None]
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._on_crash = on_crash
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers = Readers()
        self.load: EngineLoad = engine.load()
        self.version = engine.book.version
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread at the next token boundary."""
        self._commands.put(None)

    async def call(self, function: Callable[[EngineBook[Any]], Result]) -> Result:
        """Run `function` in the engine's thread at the next token boundary; its `LaminarError` is raised here."""
        return await self._run_there(lambda engine: function(engine.book))

    async def _run_there(self, function: Callable[[TorchEngine], Result]) -> Result:
        future: Future[Result] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():  # who asked has gone
                return
            try:
                result = function(self._engine)
            except LaminarError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    async def generate(self, wire: GenerateWire) -> "asyncio.Queue[Update]":
        """Queue a request.

        Returns:
            What becomes of it: one update at its end, or for a stream one a step.

        Raises:
            LaminarError: if the engine refuses it.
        """
        reader = Reader(asyncio.Queue(), wire.stream)

        def add(engine: TorchEngine) -> None:
            engine.add(wire)
            self._readers.add(wire.rid, reader)

        await self._run_there(add)
        return reader.updates

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._deliver(self._engine.step())
        except BaseException as error:  # noqa: BLE001 a supervisor's watch: the thread must not die in silence
            self._loop.call_soon_threadsafe(self._on_crash, error)

    def _run_commands(self) -> bool:
        """Run what is queued, waiting for the first if the engine has nothing to do; False at the end."""
        waits = not self._engine.book.has_work
        while True:
            try:
                command = self._commands.get(block=waits)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            waits = False

    def _deliver(self, report: StepReport) -> None:
        """Hand the changes of one step to the readers, in one call of the event loop."""
        self.load, self.version = self._engine.load(), self._engine.book.version
        if updates := self._readers.updates(report, self.version):
            self._loop.call_soon_threadsafe(hand_over, updates)
