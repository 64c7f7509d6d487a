"""Steps as telemetry events that outlast a Redis outage: one point a step, also when an event was dropped or forgotten."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from laminar.telemetry.stream import TelemetryWriter

MAX_REMEMBERED = 64

_Step = tuple[Mapping[str, float], Mapping[str, Any]]


class StepLog:
    """Emits steps in order; the observer takes each number once."""

    def __init__(self, telemetry: TelemetryWriter) -> None:
        self._telemetry = telemetry
        self._sent: deque[_Step] = deque(maxlen=MAX_REMEMBERED)
        self._unsent: deque[_Step] = deque(maxlen=MAX_REMEMBERED)

    async def add(self, metrics: Mapping[str, float], fields: Mapping[str, Any]) -> None:
        """Emit a step, after those that could not be emitted before."""
        self._unsent.append((metrics, fields))
        await self.flush()

    async def flush(self) -> None:
        """Emit what is still to be emitted, as far as Redis takes it."""
        while self._unsent:
            metrics, fields = self._unsent[0]
            dropped = self._telemetry.dropped
            await self._telemetry.emit("step", metrics, fields=fields)
            if self._telemetry.dropped > dropped:
                return
            self._sent.append(self._unsent.popleft())

    async def repeat(self) -> None:
        """Emit the last steps once more: the server has lost its newest writes."""
        self._unsent = deque([*self._sent, *self._unsent], maxlen=MAX_REMEMBERED)
        self._sent.clear()
        await self.flush()
