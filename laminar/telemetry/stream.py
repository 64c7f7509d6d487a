"""Telemetry events: a bounded Redis stream between the roles and the observer.

Losing telemetry never slows or stops anybody: the stream is trimmed, and a writer that meets an error drops the event and
counts it.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import redis.asyncio
import redis.exceptions

from laminar.telemetry.registry import check_declared

MAX_EVENTS = 20_000
"""About how many events the stream keeps."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        role: who says so (`trainer-0`, `rollout-1`, `supervisor`).
        kind: `step`, `worker`, `clock`, `relay`, `system`, `repack`, `waiting`, `restored`, `evaluation`, `control`,
            `notice`, `alert`, `retired` or `begin`.
        time: Unix seconds.
        metrics: declared names to values.
        fields: anything else (texts, histograms), JSON-like.
        event_id: its place in the stream, `MILLISECONDS-NUMBER`, rising over all lives; empty until it is read there.
    """

    role: str
    kind: str
    time: float
    metrics: dict[str, float]
    fields: dict[str, Any]
    event_id: str = ""


def order_of(event_id: str) -> tuple[int, int]:
    """An event id as numbers that can be compared; that of no event comes first."""
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds or 0), int(number or 0)


def stream_key(run_id: str) -> str:
    """The stream's key."""
    return f"laminar:{run_id}:telemetry"


class TelemetryWriter:
    """Writes one role's events."""

    def __init__(self, client: "redis.asyncio.Redis", run_id: str, role: str) -> None:
        self._client, self._key, self._role = client, stream_key(run_id), role
        self.dropped = 0

    async def emit(
        self, kind: str, metrics: Mapping[str, float] | None = None, *, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Append one event; on a Redis error it is dropped and counted."""
        metrics = dict(metrics or {})
        check_declared(metrics)
        event = Event(self._role, kind, time.time(), metrics, dict(fields or {}))
        try:
            await self._client.xadd(self._key, {b"e": msgspec.msgpack.encode(event)}, maxlen=MAX_EVENTS, approximate=True)
        except redis.exceptions.RedisError:
            self.dropped += 1


class TelemetryReader:
    """Reads every role's events in order."""

    def __init__(self, client: "redis.asyncio.Redis", run_id: str) -> None:
        self._client, self._key, self._cursor = client, stream_key(run_id), "0-0"

    async def begin(self, after: tuple[int, int]) -> None:
        """Empty the stream; whatever the clock says, ids of its events come after this one, as `order_of` gives it."""
        await self._client.delete(self._key)
        first = msgspec.msgpack.encode(Event("supervisor", "begin", time.time(), {}, {}))
        await self._client.xadd(self._key, {b"e": first}, id=f"{after[0]}-{after[1] + 1}")
        self._cursor = "0-0"

    async def read(self, max_events: int = 1000) -> list[Event]:
        """Events since the last call, oldest first; empty if there are none or Redis is away for the moment."""
        try:
            answer: Any = await self._client.xread({self._key: self._cursor}, count=max_events)
        except redis.exceptions.RedisError:
            return []
        events = []
        for _stream, entries in answer.items() if isinstance(answer, dict) else answer:
            for identity, body in entries:
                self._cursor = identity
                event = msgspec.msgpack.decode(body[b"e"], type=Event)
                events.append(replace(event, event_id=identity.decode()))
        return events
