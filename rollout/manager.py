"""The rollout manager: looks at all replicas every few seconds and right after a publish; empties those that only finish.

It decides by `laminar.policies.repack` on what replicas say of themselves (`laminar.directory`), and tells sources where to
send their trajectories; whether that still fits is checked by the destination, trajectory by trajectory. So a plan made on
old numbers, or a manager that dies half-way, costs a detour, never a trajectory: one that cannot go stays where it is.
It knows neither engines nor trajectories.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from laminar.cluster.roles import RoleContext
from laminar.config.rollout import RepackConfig
from laminar.config.root import LaminarConfig
from laminar.config.sizes import repack_limits
from laminar.directory import ReplicaDirectory, ReplicaEntry
from laminar.experience.client import connect
from laminar.policies.repack import Move, RepackLimits, latch_idle, plan_repack
from laminar.telemetry.clock import StateClock, report_clock
from laminar.telemetry.stream import TelemetryWriter
from laminar.types import WeightVersion

logger = logging.getLogger("laminar.rollout.manager")

CONNECT_SECONDS = 60.0
LOOK_SECONDS = 0.5
"""Time between looks at the directory; workers show themselves as often."""
DEADLINE_MARGIN_SECONDS = 5.0
"""A source may take its own deadline for every move; its answer may take this longer."""

Release = Callable[[str, str, str], Awaitable[Mapping[str, int]]]
"""Tell the source behind the first door to send everything to the second, if it still drains at this version.

Answers how many `moved` and `stayed`, and how many `guests` were asked to move.
"""


@dataclass(slots=True)
class Tally:
    """What plans came to so far; `plan_seconds` is CPU time."""

    plans: int = 0
    released_replicas: int = 0
    moved_trajectories: int = 0
    moved_tokens: float = 0.0
    failed_moves: int = 0
    plan_seconds: float = 0.0


@dataclass(slots=True)
class Repacker:
    """Makes and carries out plans.

    Attributes:
        config: `[rollout.repack]`.
        limits: what plans must keep to.
        release: tells a source.
        tally: what came of it.
    """

    config: RepackConfig
    limits: RepackLimits
    release: Release
    tally: Tally = field(default_factory=Tally)
    _latched: dict[str, int] = field(default_factory=dict)
    _busy: Counter[str] = field(default_factory=Counter)

    async def consolidate(self, entries: Sequence[ReplicaEntry]) -> tuple[Move, ...]:
        """Plan on what the directory says, and move; returns the plan once it is carried out or given up.

        May be called again meanwhile: replicas in moves that have not ended are in no further plan, so a slow one holds
        nobody else up.
        """
        started = time.thread_time()
        moves = self.plan(entries)
        self.tally.plan_seconds += time.thread_time() - started
        if moves:
            self.tally.plans += 1
            known = {entry.replica: entry for entry in entries}
            self._busy.update(name for move in moves for name in (move.source, move.destination))
            async with asyncio.TaskGroup() as group:
                for move in moves:
                    group.create_task(self._carry_out(known[move.source], known[move.destination]))
        return moves

    def plan(self, entries: Sequence[ReplicaEntry]) -> tuple[Move, ...]:
        """Which replicas to empty now. Only those that drain for a newer version are sources or destinations."""
        loads = [load for entry in entries if (load := entry.load()) is not None]
        self._latched = latch_idle(self._latched, loads, self.config.kv_high)
        draining = {entry.replica for entry in entries if entry.is_draining and not self._busy[entry.replica]}
        versions = [WeightVersion.parse(entry.newest) for entry in entries if entry.newest]
        if not draining or not versions:
            return ()
        candidates = [load for load in loads if load.replica in draining]
        return plan_repack(candidates, self._latched, max(versions), self.limits)

    async def _carry_out(self, source: ReplicaEntry, destination: ReplicaEntry) -> None:
        try:
            async with asyncio.timeout(self.config.deadline_seconds + DEADLINE_MARGIN_SECONDS):
                outcome = await self.release(source.url, destination.url, source.version)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            logger.warning("%s could not be emptied into %s: %r", source.replica, destination.replica, error)
            return
        finally:
            self._busy.subtract((source.replica, destination.replica))
        moved, stayed = outcome["moved"] + outcome["guests"], outcome["stayed"]
        self.tally.moved_trajectories += moved
        self.tally.moved_tokens += source.context_tokens * moved / max(1, moved + stayed)
        self.tally.failed_moves += stayed
        self.tally.released_replicas += bool(moved) and not stayed
        logger.info("%s into %s: %s", source.replica, destination.replica, dict(outcome))


class RolloutManager:
    """The manager as a role."""

    def __init__(self, context: RoleContext, config: LaminarConfig) -> None:
        self._context, self._config = context, config
        self._stopping = asyncio.Event()
        self._clock, self._num_plans = StateClock("start"), 0

    async def start(self) -> None:
        """Connect."""
        self._redis = await connect(self._context.redis_url, patience_seconds=CONNECT_SECONDS)
        self._directory = ReplicaDirectory(self._redis, self._context.run_id)
        self._telemetry = TelemetryWriter(self._redis, self._context.run_id, self._context.role)
        headers = {"Authorization": f"Bearer {self._context.token}"}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))
        self._repacker = Repacker(self._config.rollout.repack, repack_limits(self._config), self._release)

    async def run(self) -> None:
        """Look and consolidate until stopped.

        Consumes: the directory. Produces: commands to sources. Waits for: the next look. A plan is made every
        `interval_seconds`, and as soon as other replicas drain than at the last look.
        """
        try:
            await self._follow()
        finally:
            await self._session.close()
            await self._redis.aclose()

    async def _consolidate(self, entries: Sequence[ReplicaEntry]) -> None:
        """One plan; the clock says `plan` while any is carried out, else `watch`."""
        self._num_plans += 1
        self._clock.enter("plan")
        try:
            await self._repacker.consolidate(entries)
        finally:
            self._num_plans -= 1
            if not self._num_plans:
                self._clock.enter("watch")

    async def _follow(self) -> None:
        planned, drained_then = 0.0, frozenset[str]()
        self._clock.enter("watch")
        async with asyncio.TaskGroup() as plans:
            reporting = plans.create_task(report_clock(self._clock, self._telemetry))
            while not self._stopping.is_set():
                entries = await self._directory.entries()
                draining = frozenset(entry.replica for entry in entries if entry.is_draining)
                now = time.monotonic()
                if draining != drained_then or now - planned >= self._config.rollout.repack.interval_seconds:
                    planned, drained_then = now, draining
                    plans.create_task(self._consolidate(entries))
                    await self._telemetry.emit("repack", metrics_of(self._repacker.tally, entries))
                await self._pause()
            reporting.cancel()

    @property
    def tally(self) -> Tally:
        """What plans came to so far."""
        return self._repacker.tally

    async def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    async def _release(self, source: str, destination: str, version: str) -> Mapping[str, int]:
        command = {"destination": destination, "version": version}
        async with self._session.post(f"{source}/release", json=command) as response:
            response.raise_for_status()
            outcome: dict[str, int] = await response.json()
        return outcome

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._stopping.wait()
        except TimeoutError:
            return


def metrics_of(tally: Tally, entries: Sequence[ReplicaEntry]) -> dict[str, float]:
    """The tally, and how full replicas are."""
    shares = [entry.context_tokens / max(entry.capacity_tokens, 1) for entry in entries]
    return {
        "repack/plans": tally.plans,
        "repack/released_replicas": tally.released_replicas,
        "repack/moved_trajectories": tally.moved_trajectories,
        "repack/moved_tokens": tally.moved_tokens,
        "repack/failed_moves": tally.failed_moves,
        "repack/plan_seconds": tally.plan_seconds,
        "repack/replicas": len(entries),
        "repack/kv_use_ratio": sum(shares) / len(shares) if shares else 0.0,
    }
