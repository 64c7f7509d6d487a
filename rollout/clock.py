"""The wall clock of one episode: its budget, and what its time goes into."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from laminar.types import FailureKind, Timings
from rollout.boundary import EpisodeError

MAX_PHASES = 64
"""Phases of one episode that are kept for drawing; what comes later is counted all the same."""


class EpisodeClock:
    """The wall budget of an episode, and what its time goes into."""

    def __init__(self, wall_seconds: float) -> None:
        self.wall_seconds = wall_seconds
        self._started_at = time.time()
        self._start = time.monotonic()
        self._spent = {"generate": 0.0, "environment": 0.0, "reward": 0.0}
        self._phases: list[tuple[str, float, float]] = []

    @property
    def remaining_seconds(self) -> float:
        """What is left of the budget."""
        return max(0.0, self._start + self.wall_seconds - time.monotonic())

    @contextmanager
    def book(self, area: str) -> Iterator[None]:
        """Count the time inside for `generate`, `environment` or `reward`."""
        begin = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self._spent[area] += end - begin
            if len(self._phases) < MAX_PHASES:
                self._phases.append((area, round(begin - self._start, 4), round(end - self._start, 4)))

    @asynccontextmanager
    async def bound(self, area: str) -> AsyncIterator[None]:
        """Book the time, and end what runs inside when the budget is used up."""
        with self.book(area):
            try:
                async with asyncio.timeout(self.remaining_seconds) as scope:
                    yield
            except TimeoutError as error:
                if not scope.expired():
                    raise
                text = f"environment.wall_seconds = {self.wall_seconds:g} ran out (in: {area}); raise it, or ask for less"
                raise EpisodeError(FailureKind.TIMEOUT, text) from error

    def timings(self) -> Timings:
        """What has been counted so far."""
        return Timings(
            started_at=self._started_at,
            generate_seconds=self._spent["generate"],
            environment_seconds=self._spent["environment"],
            reward_seconds=self._spent["reward"],
            total_seconds=time.monotonic() - self._start,
            phases=tuple(self._phases),
        )
