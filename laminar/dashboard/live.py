"""What a living run says now, from the data module; of a finished one, what its timeline file says last.

Invariants: reading never changes the run; a data module that is away, or a state file that cannot be read, makes values old,
which is shown, not an error. Which events are new is told by their place in the stream, and whether a role is silent by our
own clock, so machines whose clocks differ are all heard. One feed serves all open pages.
"""

import asyncio
import json
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import redis.exceptions
from redis.asyncio import Redis

from laminar.errors import LaminarError, reason
from laminar.experience.answers import Snapshot
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.store import ExperienceStore
from laminar.run_folder import RunFolder, RunState
from laminar.telemetry.stream import Event, TelemetryReader, order_of
from laminar.telemetry.timeline import read_timeline
from laminar.types import GroupState

logger = logging.getLogger("laminar.dashboard")

POLL_SECONDS = 0.5
RELAYS_SECONDS = 5.0
"""Between two looks for relays, which go over all keys of the server."""
KEPT_SECONDS = 900.0
"""Spans that are kept, for the timeline."""
MAX_SPANS = 4000
"""Of one role."""


@dataclass(slots=True)
class Role:
    """The latest of one role; `heard_at` in Unix seconds."""

    metrics: dict[str, float] = field(default_factory=dict)
    heard_at: float = 0.0
    state: str = ""


@dataclass(slots=True)
class LiveView:
    """What is known now.

    Attributes:
        roles: by name.
        spans: of each role, oldest first: state, start, end.
        windows: of each role, earlier metrics with their time: what happened lately is a difference.
        trainer_wait: what the trainer waits for.
        snapshot: of the buffer.
        retired: roles that ended in order, and are not missed.
    """

    roles: dict[str, Role] = field(default_factory=lambda: defaultdict(Role))
    spans: dict[str, deque[tuple[str, float, float]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=MAX_SPANS))
    )
    windows: dict[str, deque[tuple[float, dict[str, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=240))
    )
    trainer_wait: str = ""
    snapshot: Snapshot | None = None
    retired: set[str] = field(default_factory=set)

    def missed(self, since: float) -> set[str]:
        """Roles that were heard since then, and have not ended in order."""
        return {name for name, role in self.roles.items() if role.heard_at >= since} - self.retired

    def apply(self, event: Event, heard_at: float | None = None) -> None:
        """Take in one event; it was heard when it was told, unless another time is given."""
        if event.kind in ("worker", "clock"):
            self.retired.discard(event.role)
            self.note_role(event.role, event.time, event.metrics)
            self.roles[event.role].heard_at = event.time if heard_at is None else heard_at
            self.add_spans(event.role, event.fields.get("spans", ()))
        elif event.kind == "retired":
            self.retired.add(str(event.fields.get("role")))
        elif event.kind == "waiting":
            self.trainer_wait = str(event.fields.get("text", ""))
        elif event.kind == "step":
            self.trainer_wait = ""

    def note_role(self, name: str, at: float, metrics: Mapping[str, float]) -> None:
        """A role's metrics of one moment; those that are not finite are left out, since a page cannot read them."""
        role = self.roles[name]
        role.metrics = {n: value for n, value in metrics.items() if math.isfinite(value)}
        self.windows[name].append((at, role.metrics))

    def add_spans(self, name: str, spans: Any) -> None:
        """A role's spans, which follow those before; a state that goes on is one span."""
        known = self.spans[name]
        for state, start, end in spans:
            if known and known[-1][0] == state and start - known[-1][2] < 0.01:
                known[-1] = (state, known[-1][1], end)
            else:
                known.append((state, start, end))
        if known:
            self.roles[name].state = known[-1][0]
        while known and known[0][2] < known[-1][2] - KEPT_SECONDS:
            known.popleft()

    def shares(self, name: str, seconds: float) -> dict[str, float]:
        """A role's states over about the last `seconds`, as shares of the time; empty if nothing is known."""
        window = self.windows[name]
        if not window:
            return {}
        now, last = window[-1]
        first = next((metrics for at, metrics in window if at >= now - seconds), last)
        before = first if first is not last and not _restarted(first, last) else {}
        spent = {state: value - before.get(state, 0.0) for state, value in last.items() if state.startswith("time/state_")}
        total = sum(spent.values())
        return {
            name.removeprefix("time/state_").removesuffix("_seconds"): seconds / total
            for name, seconds in spent.items()
            if total > 0
        }


def _restarted(first: Mapping[str, float], last: Mapping[str, float]) -> bool:
    return any(last.get(name, 0.0) < value for name, value in first.items() if name.startswith("time/state_"))


class LiveFeed:
    """Keeps a view of one run up to date.

    Attributes:
        view: what is known.
        state: the run folder's state file.
        is_alive: whether some process holds the run.
        relays: what each machine's relay says of itself.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.view = LiveView()
        self.state: RunState = folder.read_state()
        self.is_alive = folder.is_alive()
        self.relays: list[dict[str, Any]] = []
        self._relays_at = -RELAYS_SECONDS
        self._client: Redis | None = None
        self._url = ""
        self._known = (0, 0)
        """The newest event of a role that is in the view."""
        self._heard: dict[str, tuple[int, int]] = {}
        """The newest event of each role."""
        self._has_looked = False

    async def run(self) -> None:
        """Follow the run until cancelled.

        Consumes: telemetry, the buffer's headers. Produces: the view. Waits for: the next look.
        """
        await asyncio.to_thread(self._read_files)
        try:
            while True:
                try:
                    self.state, self.is_alive = self._folder.read_state(), self._folder.is_alive()
                    await self._look()
                except (redis.exceptions.RedisError, OSError, LaminarError) as error:
                    logger.info("the run cannot be looked at now: %s", error)
                    await self._close()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await self._close()

    async def look_once(self) -> str:
        """See what is to be seen now, for who does not stay; returns why the data module does not answer, or nothing."""
        await asyncio.to_thread(self._read_files)
        try:
            await self._look()
        except (redis.exceptions.RedisError, OSError, LaminarError) as error:
            return reason(error)
        finally:
            await self._close()
        return ""

    def _read_files(self) -> None:
        for line in read_timeline(self._folder.timeline):
            if line["kind"] == "spans":
                self.view.add_spans(line["role"], line["spans"])
                order = order_of(line.get("event", ""))
                self._known, self._heard[line["role"]] = max(self._known, order), order
                self.view.roles[line["role"]].heard_at = order[0] / 1000
            else:  # of every role the latest, also of one that has been silent for long
                for name, metrics in line["roles"].items():
                    self.view.note_role(name, line["time"], metrics)

    async def _look(self) -> None:
        if not self.is_alive or not self.state.redis_url:
            await self._close()
            self.view.snapshot, self.view.trainer_wait = None, ""
            return
        if self._client is None or self._url != self.state.redis_url:
            await self._close()
            self._client, self._url = await connect(self.state.redis_url), self.state.redis_url
            self._reader = TelemetryReader(self._client, self.state.run_id)
            self._buffer = ExperienceBuffer(ExperienceStore(self._client, self.state.run_id, outage_seconds=1.0))
        while events := await self._reader.read():
            for event in events:
                self._take(event)
        self._has_looked = True
        self.view.snapshot = await self._buffer.peek()
        if time.monotonic() - self._relays_at > RELAYS_SECONDS:
            self.relays, self._relays_at = await self._read_relays(self._client), time.monotonic()

    def _take(self, event: Event) -> None:
        """Take in what the stream has; what the files, or a look over an earlier connection, had told is no news."""
        order = order_of(event.event_id)
        if event.kind in ("worker", "clock"):
            if order <= self._known:
                return
            self._known = self._heard[event.role] = order
        elif event.kind == "retired" and order < self._heard.get(str(event.fields.get("role")), order):
            return  # it has come again since then
        # The first look finds what was told long ago; then the server's clock, which is one for all roles, says when.
        self.view.apply(event, time.time() if self._has_looked else order[0] / 1000)

    async def _read_relays(self, client: Redis) -> list[dict[str, Any]]:
        pattern = f"laminar:{self.state.run_id}:directory:relay:*"
        texts = [await client.get(key) async for key in client.scan_iter(match=pattern, count=1000)]
        return [json.loads(text) for text in texts if text]

    async def _close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()


def describe_buffer(snapshot: Snapshot | None) -> dict[str, Any]:
    """Outstanding groups by staleness, in flight and in queue, and where all trajectories stand."""
    if snapshot is None or not snapshot.is_open:
        return {}
    now = snapshot.published.number
    ages: dict[str, Counter[int]] = {state.value: Counter() for state in GroupState}
    for header in snapshot.headers:
        ages[header.state.value][max(0, now - header.oldest)] += 1
    return {
        "published": str(snapshot.published),
        "is_paused": snapshot.is_paused,
        "bound": snapshot.max_staleness,
        "ages": {state: dict(sorted(counts.items())) for state, counts in ages.items()},
        "counters": asdict(snapshot.counters),
        "reserved_bytes": snapshot.reserved_bytes,
        "at": time.time(),
    }
