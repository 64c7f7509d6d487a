"""What the HTTP routes need of an engine, whichever it is, and how a request's reader hears of its tokens.

Invariants: a reader gets what is new since its last update, and exactly one last update; between two token boundaries an
engine does not change. This module knows neither HTTP nor models.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollout.engines.book import EngineBook, StepReport
from rollout.engines.wire import EngineLoad, GenerateWire, Output

Result = TypeVar("Result")


class EngineDoor(Protocol):
    """The way from an event loop to an engine that runs by itself."""

    @property
    def load(self) -> EngineLoad:
        """How busy it is, as of its last step."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        ...

    async def call(self, function: Callable[[EngineBook[Any]], Result]) -> Result:
        """Run `function` at the next token boundary; its `LaminarError` is raised here."""
        ...

    async def generate(self, wire: GenerateWire) -> "asyncio.Queue[Update]":
        """Queue a request; what becomes of it."""
        ...


@dataclass(frozen=True, slots=True)
class Update:
    """What a reader of one request sees: the JSON answer, or the text of an error."""

    answer: dict[str, Any] | None
    error: str
    finished: bool


@dataclass(slots=True)
class Reader:
    """Who waits for a request; `sent` tokens were handed over already (streams are incremental)."""

    updates: "asyncio.Queue[Update]"
    streams: bool
    sent: int = 0


class Readers:
    """Who reads which request; a stream's reader hears of at least `stream_interval` tokens at once, except of the last."""

    def __init__(self, stream_interval: int = 1) -> None:
        self._stream_interval = stream_interval
        self._readers: dict[str, Reader] = {}

    def add(self, rid: str, reader: Reader) -> None:
        """A reader for a request that was queued."""
        self._readers[rid] = reader

    def updates(self, report: StepReport, version: str) -> list[tuple[Reader, Update]]:
        """What a step means to whom; `version` is the engine's present one."""
        updates: list[tuple[Reader, Update]] = []
        for rid, output in report.outputs.items():
            finished = output.finish_reason is not None
            reader = self._readers.pop(rid, None) if finished else self._readers.get(rid)
            if reader is None:
                continue
            if finished or (reader.streams and len(output.ids) - reader.sent >= self._stream_interval):
                updates.append((reader, _update(reader, output, version, finished)))
        return updates


def _update(reader: Reader, output: Output, version: str, finished: bool) -> Update:
    if output.error:
        return Update(None, output.error, True)
    answer = output.answer(version, reader.sent)
    reader.sent = len(output.ids)
    return Update(answer, "", finished)


def hand_over(updates: list[tuple[Reader, Update]]) -> None:
    """In the event loop: give each reader its update."""
    for reader, update in updates:
        reader.updates.put_nowait(update)
