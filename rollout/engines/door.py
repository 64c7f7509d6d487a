"""What the HTTP routes need of an engine, whichever it is, and how a request's reader hears of its tokens.

Invariants: a reader gets what is new since its last update, and exactly one last update; between two token boundaries an
engine does not change. This module knows neither HTTP nor models.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollout.engines.wire import EngineLoad, GenerateWire, Output, PauseMode, RankReport

Result = TypeVar("Result")


class Engine(Protocol):
    """What can be asked of an engine at a token boundary. Errors: see `TorchEngine`."""

    folder: Path
    version: str
    weights_known: bool

    def add(self, wire: GenerateWire) -> Output:
        """Queue a request."""
        ...

    def abort(self, rid: str | None) -> int:
        """End one request, or all, with what they have."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...

    def update_weights(self, folder: Path, version: str, flush_cache: bool) -> None:
        """Serve other weights."""
        ...

    def flush_cache(self) -> None:
        """Drop all keys and values."""
        ...

    def load(self) -> EngineLoad:
        """How busy it is."""
        ...

    def read_back(self) -> list[RankReport]:
        """What each rank holds."""
        ...


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

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run `function` at the next token boundary; its `LaminarError` is raised here."""
        ...

    async def generate(self, wire: GenerateWire) -> "asyncio.Queue[Update]":
        """Queue a request; what becomes of it."""
        ...


@dataclass(slots=True)
class StepReport:
    """Outputs that grew or ended since the last report, in order; an ended one has a finish reason or an error."""

    outputs: dict[str, Output] = field(default_factory=dict)


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
    """Who reads which request."""

    def __init__(self) -> None:
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
            if reader is not None and (finished or reader.streams):
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
