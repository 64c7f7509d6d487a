"""Follows a run's events and keeps the view; writes nothing. What the supervisor's own panel and watchdog look at.

Invariant: a step that was told before (one that is replayed, or repeated after Redis lost its tail) is progress, not news.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from laminar.telemetry.stream import Event
from laminar.telemetry.view import RunView

POLL_SECONDS = 0.25


class Reader(Protocol):
    """Where events come from."""

    async def read(self) -> list[Event]:
        """Events since the last call, oldest first."""
        ...


class Follower:
    """Follows one life of a run.

    Args:
        reader: of its events.
        view: kept.
        last_step: the newest step that is known already.
        on_event: told of each event that is news, after the view.

    Attributes:
        view: what is known.
        last_progress: when (`time.monotonic`) a step was last heard of.
    """

    def __init__(self, reader: Reader, view: RunView, last_step: int, on_event: Callable[[Event], None]) -> None:
        self.view, self.last_progress = view, time.monotonic()
        self._reader, self._last_step, self._on_event = reader, last_step, on_event

    async def run(self) -> None:
        """Follow the run until cancelled.

        Consumes: telemetry events. Produces: the view. Waits for: new events, by polling.
        """
        while True:
            await self.drain()
            await asyncio.sleep(POLL_SECONDS)

    async def drain(self) -> None:
        """Take in all events that are there."""
        while events := await self._reader.read():
            for event in events:
                self._take(event)

    def _take(self, event: Event) -> None:
        if event.kind == "step":
            self.last_progress = time.monotonic()
            if event.metrics["train/step"] <= self._last_step:
                return
            self._last_step = int(event.metrics["train/step"])
        elif event.kind == "restored":
            self._last_step = int(event.fields["step"])
        self.view.apply(event)
        self._on_event(event)
