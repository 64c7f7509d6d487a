"""What a role does with its time: one state at any moment, from its making on, so its states sum to its wall time.

Safe to use from several threads. It knows neither what the states mean nor who reads them.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from laminar.telemetry.stream import TelemetryWriter

REPORT_SECONDS = 0.5
SILENT_SECONDS = 10 * REPORT_SECONDS
"""A role that has not reported for longer counts as silent: it hangs, is stopped or is gone."""
MAX_SPANS = 60
"""Spans kept between two reports; beyond that neighbours are joined, for drawing only: totals stay exact."""

Span = tuple[str, float, float]
"""State, start and end in Unix seconds."""


class StateClock:
    """One role's clock.

    Args:
        state: the first one.
        now: monotonic seconds.
    """

    def __init__(self, state: str, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._state, self._since = state, now()
        self._unix_offset = time.time() - self._since
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._spans: list[Span] = []

    @property
    def state(self) -> str:
        """What the role does now."""
        return self._state

    def enter(self, state: str) -> None:
        """From now on the role does this."""
        with self._lock:
            if state != self._state:
                self._close()
                self._state = state

    def take(self) -> tuple[dict[str, float], list[Span]]:
        """Seconds in each state since the beginning, as metrics; and the spans since the last call."""
        with self._lock:
            self._close()
            spans, self._spans = self._spans, []
            return {f"time/state_{state}_seconds": seconds for state, seconds in self._totals.items()}, spans

    def _close(self) -> None:
        now = self._now()
        self._totals[self._state] += now - self._since
        start, end = self._since + self._unix_offset, now + self._unix_offset
        if self._spans and self._spans[-1][0] == self._state:
            self._spans[-1] = (self._state, self._spans[-1][1], end)
        elif len(self._spans) < MAX_SPANS:
            self._spans.append((self._state, start, end))
        else:
            state, first, _ = self._spans[-1]
            self._spans[-1] = (state, first, end)
        self._since = now


async def report_clock(clock: StateClock, telemetry: TelemetryWriter) -> None:
    """Tell what a role does, until cancelled.

    Consumes: the clock. Produces: `clock` events. Waits for: the next report.
    """
    while True:
        await emit_clock(clock, telemetry)
        await asyncio.sleep(REPORT_SECONDS)


async def emit_clock(clock: StateClock, telemetry: TelemetryWriter) -> None:
    """Tell it once."""
    totals, spans = clock.take()
    await telemetry.emit("clock", totals, fields={"spans": spans})
