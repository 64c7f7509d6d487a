"""Rank 0's side of the data module: filter what is ready, wait for a legal batch by name, take it.

Groups are filtered before they are taken (uninformative ones, and those without a token young enough), so a batch is never
empty or short but at the end of the data; what is kept beyond a batch waits for the next one. Every decision is
`laminar.policies`; this module only carries it out.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from laminar.config.root import LaminarConfig
from laminar.config.sizes import members_per_group
from laminar.errors import ExperienceError, RunFailedError
from laminar.experience.answers import Occurrence, Snapshot
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.payloads import PayloadLostError
from laminar.plugins import resolve
from laminar.policies.masking import newest_trained_number, oldest_trained_number
from laminar.policies.over_provision import tail_of_batch
from laminar.policies.samplers import SAMPLERS
from laminar.policies.staleness import BatchPlan, fewest_evictions, plan_batch
from laminar.types import EvictionReason, GroupHeader, GroupState, Purpose, Trajectory, WeightVersion
from trainer.prefetch import Group, Prefetcher

logger = logging.getLogger("laminar.trainer.sampling")

POLL_SECONDS = 0.02
WAIT_NOTICE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A taken batch.

    Attributes:
        group_ids: in training order.
        groups: in the same order.
        waited_seconds: until it was there.
        seen_rewards: of all groups judged meanwhile, filtered ones included.
        num_judged: groups judged meanwhile; `num_kept` of them were kept, for this batch or a later one, and in
            `num_passed` of them an answer passed.
        oldest_age_seconds: since the group was first seen that has waited longest, of those ready when it was drawn.
        dropped_lengths: trajectories evicted for their age since the last batch, by length; see `Counters`.
        oldest_trained: tokens of versions below this number are not trained.
        snapshot: what the batch was drawn from.
    """

    group_ids: tuple[str, ...]
    groups: tuple[Group, ...]
    waited_seconds: float
    seen_rewards: tuple[float, ...]
    num_judged: int
    num_kept: int
    num_passed: int
    oldest_age_seconds: float
    dropped_lengths: dict[str, int]
    oldest_trained: int
    snapshot: Snapshot

    def metrics(self) -> dict[str, float]:
        """What became of the groups that ended while the batch was gathered."""
        counters = self.snapshot.counters
        metrics: dict[str, float] = {
            "experience/judged_groups": self.num_judged,
            "experience/oldest_age_seconds": self.oldest_age_seconds,
            "experience/refilled": counters.refilled,
            "experience/abandoned": counters.abandoned,
            **{f"experience/evictions_{reason}": count for reason, count in counters.evicted.items()},
            **{f"staleness/dropped_length_{bucket}": count for bucket, count in self.dropped_lengths.items()},
        }
        if self.seen_rewards:
            metrics["reward/finished_mean"] = sum(self.seen_rewards) / len(self.seen_rewards)
        if self.num_judged:
            metrics["experience/kept_ratio"] = self.num_kept / self.num_judged
            metrics["reward/pass_at_k"] = self.num_passed / self.num_judged
        return metrics

    @property
    def num_trained(self) -> int:
        """Trajectories to train; greedy ones only compare."""
        return sum(trajectory.purpose is Purpose.TRAIN for group in self.groups for trajectory in group)

    @property
    def groups_left(self) -> int | None:
        """Of the data, once these are trained, as far as none of them is played again; None if the data has no end."""
        if self.snapshot.prompts_left is None:
            return None
        return self.snapshot.prompts_left + len(self.snapshot.headers) - len(self.group_ids)

    @property
    def occurrences(self) -> tuple[Occurrence, ...]:
        """The prompts that the groups play."""
        return tuple(self.snapshot.occurrences[group_id] for group_id in self.group_ids)


@dataclass(frozen=True, slots=True)
class _Judged:
    """A group that was kept: number of its newest token's version, and when it was first seen (`time.monotonic`)."""

    group: Group
    newest: int
    seen_at: float


@dataclass(slots=True)
class _Wait:
    """One wait for a batch: what failed before it, and of what was judged since, how much failed, was filtered, was cut."""

    started: float
    failed_before: Counter[str] | None = None
    num_failed_judged: int = 0
    due_since: dict[str, float] = field(default_factory=dict)
    noticed: float = 0.0
    rounds_noticed: int = 0
    num_judged: int = 0
    num_filtered: int = 0
    num_cut: int = 0
    num_passed: int = 0
    rewards: list[float] = field(default_factory=list)


class BatchSource:
    """Makes batches of what the buffer holds.

    Attributes:
        dropped_groups: groups evicted for their age so far.
        prefetcher: reads groups, ahead of the next batch if it runs.
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
        self._order = resolve(config.experience.sampler, SAMPLERS, "experience.sampler")
        self._batch_size, self._num_members = config.trainer.prompts_per_step, members_per_group(config)
        self.prefetcher = Prefetcher(buffer)
        self._judged: dict[str, _Judged] = {}
        self._dropped_before: Counter[str] | None = None
        self._loosest_bound = config.staleness.bound
        self.dropped_groups = 0
        self.first_group_at: float | None = None

    def ahead(self) -> AbstractContextManager[None]:
        """Let what becomes ready meanwhile be fetched for the next batch, if `prefetcher` runs."""
        return self.prefetcher.ahead(self._judged)

    async def next_batch(self, lineage: int, step: int, should_stop: Callable[[], bool]) -> Batch | None:
        """Wait for a legal batch for `step` and take it; None at the end of the data, or when told to stop.

        Raises:
            RunFailedError: too many rounds of groups were of no use (`trainer.max_filter_rounds`).
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
            self._note_bound(snapshot)
            if snapshot.headers and self.first_group_at is None:
                self.first_group_at = time.monotonic()
            if self._dropped_before is None:
                self._dropped_before = Counter(snapshot.counters.dropped_lengths)
            filtered = await self._filter(snapshot, wait)
            if wait.failed_before is None:
                wait.failed_before, wait.num_failed_judged = Counter(snapshot.counters.failed), 0
            if sum(h.state is GroupState.READY and h.group_id in self._judged for h in snapshot.headers) < self._batch_size:
                await self._check_rounds(snapshot, wait)
            if not filtered and not await self._evict_fully_masked(snapshot, step):
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

    def _note_bound(self, snapshot: Snapshot) -> None:
        """Follow a bound that changes while the run lives; groups keep theirs, so the loosest one counts."""
        if self._loosest_bound is not None and snapshot.max_staleness is not None:
            self._loosest_bound = max(self._loosest_bound, snapshot.max_staleness)

    def _plan(self, snapshot: Snapshot, step: int) -> BatchPlan:
        return plan_batch(
            snapshot.headers,
            trained_on=step - 1,
            prompts_per_step=self._batch_size,
            max_staleness=self._config.staleness.bound,
            order=self._order,
            end_of_data=snapshot.end_of_data,
        )

    async def _filter(self, snapshot: Snapshot, wait: _Wait) -> bool:
        """Judge groups that became ready; returns whether any was filtered (then the snapshot is out of date)."""
        new = [h.group_id for h in snapshot.headers if h.state is GroupState.READY and h.group_id not in self._judged]
        useless = []
        try:
            fetched = await self.prefetcher.fetch(new) if new else []
        except PayloadLostError as error:
            await self._notice(f"{error}; its prompt is issued again")
            await self._evict([error.group_id], EvictionReason.PAYLOAD_LOST)
            return True
        for group_id, group in zip(new, fetched, strict=True):
            wait.num_failed_judged += self._num_members - sum(t.failure is None for t in group)
            rewards = [t.reward for t in group if t.reward is not None and t.purpose is Purpose.TRAIN]
            wait.rewards += rewards
            wait.num_passed += max(rewards, default=-math.inf) >= self._config.eval.pass_reward
            if self._keeps(group):
                self._judged[group_id] = _Judged(group, newest_trained_number(group), time.monotonic())
            else:
                useless.append(group_id)
                wait.num_cut += all(t.is_truncated for t in group if t.failure is None)
        wait.num_judged += len(new)
        wait.num_filtered += len(useless)
        if useless:
            await self._buffer.filter(useless)
        return bool(useless)

    async def _check_rounds(self, snapshot: Snapshot, wait: _Wait) -> None:
        """After too many rounds of useless groups for one batch: stop, or say so once a round."""
        trainer, failures = self._config.trainer, Counter(snapshot.counters.failed) - (wait.failed_before or Counter())
        num_failed = (
            max(0, failures.total() - wait.num_failed_judged) // self._num_members
        )  # a judged group counts as judged
        rounds = (wait.num_filtered + num_failed) // self._batch_size
        if rounds < trainer.max_filter_rounds or rounds <= wait.rounds_noticed:
            return
        text = f"{rounds} rounds of {self._batch_size} groups gave no batch: " + describe_useless(
            wait.num_filtered, wait.num_cut, num_failed, failures
        )
        if trainer.on_uninformative == "stop":
            raise RunFailedError(text)
        wait.rounds_noticed = rounds
        logger.warning("%s", text)
        await self._notice(f"informative groups: {text}")

    async def _evict_fully_masked(self, snapshot: Snapshot, step: int) -> bool:
        """Let groups go that have no token young enough for this step; returns whether there were any."""
        oldest_trained = oldest_trained_number(step - 1, self._loosest_bound)
        outstanding = {header.group_id for header in snapshot.headers if header.state is GroupState.READY}
        masked = [g for g, judged in self._judged.items() if g in outstanding and judged.newest < oldest_trained]
        if masked:
            await self._evict(masked, EvictionReason.FULLY_MASKED)
        return bool(masked)

    async def _take(self, lineage: int, step: int, chosen: Sequence[str], snapshot: Snapshot, wait: _Wait) -> Batch:
        group_ids = await self._buffer.take(lineage, step, chosen)
        missing = [group_id for group_id in group_ids if group_id not in self._judged]
        fetched = dict(zip(missing, await self._buffer.fetch(missing), strict=True)) if missing else {}
        await self._recycle_tail(snapshot, group_ids)
        groups = tuple(fetched[g] if g in fetched else self._judged[g].group for g in group_ids)
        outstanding = {header.group_id for header in snapshot.headers}
        now = time.monotonic()
        oldest_age_seconds = max(
            (now - judged.seen_at for g, judged in self._judged.items() if g in outstanding), default=0.0
        )
        outstanding -= set(group_ids)
        self._judged = {group_id: judged for group_id, judged in self._judged.items() if group_id in outstanding}
        dropped = Counter(snapshot.counters.dropped_lengths)
        new_dropped, self._dropped_before = dropped - (self._dropped_before or Counter()), dropped
        return Batch(
            group_ids=tuple(group_ids),
            groups=groups,
            waited_seconds=now - wait.started,
            seen_rewards=tuple(wait.rewards),
            num_judged=wait.num_judged,
            num_kept=wait.num_judged - wait.num_filtered,
            num_passed=wait.num_passed,
            oldest_age_seconds=oldest_age_seconds,
            dropped_lengths=dict(new_dropped),
            oldest_trained=oldest_trained_number(step - 1, self._loosest_bound),
            snapshot=snapshot,
        )

    async def _recycle_tail(self, snapshot: Snapshot, taken: Sequence[str]) -> None:
        """With over-provisioning: let go of what the batch has overtaken."""
        ratio = self._config.rollout.over_provision
        if ratio > 1 and self._config.staleness.bound != 0:
            tail = tail_of_batch(snapshot.headers, taken, ratio=ratio, prompts_per_step=self._batch_size)
            if tail:
                await self._evict(tail, EvictionReason.RECYCLED)

    async def _wait_for_due(self, snapshot: Snapshot, plan: BatchPlan, step: int, wait: _Wait) -> None:
        """Wait a moment; by policy, evict groups in flight that hold the batch up."""
        now = time.monotonic()
        wait.due_since = {header.group_id: wait.due_since.get(header.group_id, now) for header in plan.due}
        staleness = self._config.staleness
        if staleness.policy == "drop" and plan.is_held_by_bound:
            await self._evict(self._fewest(snapshot, step), EvictionReason.STALE)
            return
        if wait.due_since and now - min(wait.due_since.values()) > staleness.max_wait_seconds:
            await self._evict(self._fewest(snapshot, step), EvictionReason.WAITED_TOO_LONG)
            return
        if now - max(wait.started, wait.noticed) > WAIT_NOTICE_SECONDS:
            wait.noticed = now
            await self._notice(describe_wait(snapshot.headers, plan, now - wait.started))
        await asyncio.sleep(POLL_SECONDS)

    def _fewest(self, snapshot: Snapshot, step: int) -> Sequence[str]:
        return fewest_evictions(snapshot.headers, trained_on=step - 1, prompts_per_step=self._batch_size)

    async def _evict(self, group_ids: Sequence[str], reason: EvictionReason) -> None:
        logger.info("evicting %s: %s", ", ".join(group_ids), reason)
        self.dropped_groups += len(group_ids) if reason.is_for_age else 0
        await self._buffer.evict(group_ids, reason, reissue=True)


def describe_useless(num_filtered: int, num_cut: int, num_failed: int, failures: Counter[str]) -> str:
    """A sentence that says what was wrong with groups, failed ones apart from uninformative ones, and what to do.

    In `num_cut` of the uninformative ones a length limit ended every answer.
    """
    parts = []
    if num_failed:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in failures.most_common())
        parts.append(f"{num_failed} failed (trajectories by kind: {kinds}); read the workers' logs for the first error")
    if num_filtered > num_cut:
        parts.append(
            f"{num_filtered - num_cut} were uninformative: the task is too easy, too hard or broken; look at the rewards, "
            "or set trainer.algorithm.options.filter_zero_variance = false"
        )
    if num_cut:
        parts.append(
            f"in {num_cut} every answer was cut at a length limit; raise rollout.max_new_tokens, and "
            "environment.max_trajectory_tokens if that is set"
        )
    return "; ".join(parts)


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
