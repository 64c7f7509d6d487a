"""Rank 0's side of the data module: filter what is ready, wait for a legal batch by name, take it.

Groups are filtered before they are taken, so a batch is never empty or short but at the end of the data. Every decision is
`laminar.policies.staleness`; this module only carries it out.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from laminar.config.root import LaminarConfig
from laminar.errors import ExperienceError, RunFailedError
from laminar.experience.answers import Occurrence, Snapshot
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.payloads import PayloadLostError
from laminar.plugins import resolve
from laminar.policies.samplers import SAMPLERS
from laminar.policies.staleness import BatchPlan, fewest_evictions, plan_batch
from laminar.types import EvictionReason, GroupHeader, GroupState, Trajectory, WeightVersion

logger = logging.getLogger("laminar.trainer.sampling")

POLL_SECONDS = 0.02
WAIT_NOTICE_SECONDS = 10.0
MAX_BARREN_BATCHES = 64
"""So many batches' worth of groups filtered or failed in a row, without one to train, end the run with the reason."""

Group = tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """A taken batch, in training order; `waited_seconds` until it was there."""

    group_ids: tuple[str, ...]
    groups: tuple[Group, ...]
    waited_seconds: float
    seen_rewards: tuple[float, ...]
    snapshot: Snapshot

    @property
    def occurrences(self) -> tuple[Occurrence, ...]:
        """The prompts that the groups play."""
        return tuple(self.snapshot.occurrences[group_id] for group_id in self.group_ids)


@dataclass(slots=True)
class _Wait:
    """One wait for a batch."""

    started: float
    due_since: float | None = None
    noticed: float = 0.0
    rewards: list[float] = field(default_factory=list)


class BatchSource:
    """Makes batches of what the buffer holds.

    Attributes:
        dropped_groups: groups evicted so far.
        first_group_at: when (`time.monotonic`) the first group was seen; before that, workers were starting.
    """

    def __init__(
        self,
        config: LaminarConfig,
        buffer: ExperienceBuffer,
        keeps: Callable[[Sequence[Trajectory]], bool],
        notice: Callable[[str], Awaitable[None]],
    ) -> None:
        self._config, self._buffer, self._keeps, self._notice = config, buffer, keeps, notice
        self._order = resolve(config.experience.sampler, SAMPLERS)
        self._judged: dict[str, Group] = {}
        self._barren = 0
        self._failed_before = 0
        self.dropped_groups = 0
        self.first_group_at: float | None = None

    async def next_batch(self, lineage: int, step: int, should_stop: Callable[[], bool]) -> Batch | None:
        """Wait for a legal batch for `step` and take it; None at the end of the data, or when told to stop.

        Raises:
            RunFailedError: nothing but useless groups arrives.
            ExperienceError: the data module does not stand at the number before `step`: it has forgotten something.
        """
        wait = _Wait(time.monotonic())
        while not should_stop():
            snapshot = await self._buffer.peek()
            if not stands_at(snapshot, WeightVersion(lineage, step - 1)):
                raise ExperienceError(
                    f"the data module stands at {snapshot.published if snapshot.is_open else 'no version'}, the trainer at "
                    f"{lineage}.{step - 1}"
                )
            if snapshot.headers and self.first_group_at is None:
                self.first_group_at = time.monotonic()
            if not await self._filter(snapshot, wait):
                plan = self._plan(snapshot, step)
                if plan.over_age:
                    await self._evict(plan.over_age, EvictionReason.STALE)
                elif plan.chosen:
                    return await self._take(lineage, step, plan.chosen, snapshot, wait)
                elif snapshot.end_of_data and not snapshot.headers:
                    return None
                else:
                    await self._wait_for_due(snapshot, plan, step, wait)
        return None

    def _plan(self, snapshot: Snapshot, step: int) -> BatchPlan:
        return plan_batch(
            snapshot.headers,
            trained_on=step - 1,
            prompts_per_step=self._config.trainer.prompts_per_step,
            max_staleness=self._config.staleness.bound,
            order=self._order,
            end_of_data=snapshot.end_of_data,
        )

    async def _filter(self, snapshot: Snapshot, wait: _Wait) -> bool:
        """Judge groups that became ready; returns whether any was filtered (then the snapshot is out of date)."""
        new = [h.group_id for h in snapshot.headers if h.state is GroupState.READY and h.group_id not in self._judged]
        useless = []
        try:
            fetched = await self._buffer.fetch(new) if new else []
        except PayloadLostError as error:
            await self._notice(f"{error}; its prompt is issued again")
            await self._evict([error.group_id], EvictionReason.PAYLOAD_LOST)
            return True
        for group_id, group in zip(new, fetched, strict=True):
            wait.rewards += [t.reward for t in group if t.reward is not None]
            if self._keeps(group):
                self._judged[group_id] = group
            else:
                useless.append(group_id)
        failed = snapshot.counters.num_failed - self._failed_before
        self._failed_before = snapshot.counters.num_failed
        self._barren += len(useless) + failed // self._config.rollout.group_size
        if self._barren > MAX_BARREN_BATCHES * self._config.trainer.prompts_per_step:
            raise RunFailedError(
                f"{self._barren} groups in a row were of no use ({snapshot.counters.filtered} trajectories filtered as "
                f"uninformative, {snapshot.counters.num_failed} failed so far): the task is too easy, too hard or broken; "
                "look at the rewards, or set trainer.algorithm.options.filter_zero_variance = false"
            )
        if useless:
            await self._buffer.filter(useless)
        return bool(useless)

    async def _take(self, lineage: int, step: int, chosen: Sequence[str], snapshot: Snapshot, wait: _Wait) -> Batch:
        group_ids = await self._buffer.take(lineage, step, chosen)
        missing = [group_id for group_id in group_ids if group_id not in self._judged]
        fetched = dict(zip(missing, await self._buffer.fetch(missing), strict=True)) if missing else {}
        known = self._judged | fetched
        groups = tuple(known[group_id] for group_id in group_ids)
        outstanding = {header.group_id for header in snapshot.headers}
        outstanding -= set(group_ids)
        self._judged = {group_id: group for group_id, group in self._judged.items() if group_id in outstanding}
        self._barren = 0
        return Batch(tuple(group_ids), groups, time.monotonic() - wait.started, tuple(wait.rewards), snapshot)

    async def _wait_for_due(self, snapshot: Snapshot, plan: BatchPlan, step: int, wait: _Wait) -> None:
        """Wait a moment; by policy, evict groups in flight that hold the batch up."""
        now = time.monotonic()
        wait.due_since = None if not plan.due else wait.due_since or now
        staleness = self._config.staleness
        if staleness.policy == "drop" and plan.is_held_by_bound:
            await self._evict(self._fewest(snapshot, step), EvictionReason.STALE)
            return
        if wait.due_since is not None and now - wait.due_since > staleness.max_wait_seconds:
            await self._evict(self._fewest(snapshot, step), EvictionReason.WAITED_TOO_LONG)
            return
        if now - max(wait.started, wait.noticed) > WAIT_NOTICE_SECONDS:
            wait.noticed = now
            await self._notice(describe_wait(snapshot.headers, plan, now - wait.started))
        await asyncio.sleep(POLL_SECONDS)

    def _fewest(self, snapshot: Snapshot, step: int) -> Sequence[str]:
        return fewest_evictions(
            snapshot.headers, trained_on=step - 1, prompts_per_step=self._config.trainer.prompts_per_step
        )

    async def _evict(self, group_ids: Sequence[str], reason: EvictionReason) -> None:
        logger.info("evicting %s: %s", ", ".join(group_ids), reason)
        self.dropped_groups += len(group_ids)
        await self._buffer.evict(group_ids, reason, reissue=True)


def stands_at(snapshot: Snapshot, version: WeightVersion) -> bool:
    """Whether the data module and the trainer agree on what is published."""
    return snapshot.is_open and snapshot.published == version


def describe_wait(headers: Sequence[GroupHeader], plan: BatchPlan, seconds: float) -> str:
    """A sentence that names what the trainer waits for."""
    if plan.is_held_by_bound:
        names = ", ".join(f"{h.group_id} (version {h.oldest}, {h.owner or 'no owner'})" for h in plan.due[:5])
        return f"{len(plan.due)} groups that must be trained now: {names}; {seconds:.0f} s so far"
    in_flight = [h for h in headers if h.state is GroupState.IN_FLIGHT]
    names = ", ".join(f"{h.group_id} ({h.owner or 'no owner'})" for h in in_flight[:5]) or "none is being played"
    return f"{plan.missing} more ready groups; in flight: {names}; {seconds:.0f} s so far"
