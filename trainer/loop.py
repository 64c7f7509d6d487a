"""Rank 0's loop: sample, train, spool, publish, acknowledge, save.

A step is committed by its spool file; what comes after may be lost and is made good, by this process or by its successor.

The loop is asynchronous only so that `stop` and telemetry get through; all torch work runs in one thread, one piece after
another. Nothing here waits for rollouts but `BatchSource.next_batch`, and that waits by name and by deadline.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import xxhash

from laminar.config.root import LaminarConfig
from laminar.errors import ExperienceError, LaminarError, RunFailedError, first_error
from laminar.experience.answers import Frontier
from laminar.experience.buffer import ExperienceBuffer
from laminar.telemetry.clock import StateClock
from laminar.telemetry.stream import TelemetryWriter
from laminar.types import GroupState, WeightVersion
from trainer.authority import Authority
from trainer.mismatch import MismatchAlarm
from trainer.prefetch import Group
from trainer.publishing import Published, WeightPublisher
from trainer.sampling import Batch, BatchSource
from trainer.session import Session
from trainer.spool_file import SpooledGroup, SpooledStep
from trainer.step import StepReport
from trainer.step_log import StepLog
from trainer.stopping import stop_reason, what_is_left

logger = logging.getLogger("laminar.trainer.loop")

Result = TypeVar("Result")

OFFER_SECONDS = 0.2
LAST_OFFER_SECONDS = 30.0
"""Pause between offers of a version that found no free slot."""


class TrainingLoop:
    """Trains from the buffer until the steps or the data end, or somebody says stop."""

    def __init__(
        self,
        config: LaminarConfig,
        session: Session,
        publisher: WeightPublisher,
        buffer: ExperienceBuffer,
        telemetry: TelemetryWriter,
        authority: Authority,
        thread: ThreadPoolExecutor,
        clock: StateClock | None = None,
    ) -> None:
        self._config, self._session, self._publisher = config, session, publisher
        self._buffer, self._telemetry = buffer, telemetry
        self._authority, self._steps = authority, StepLog(telemetry)
        self.progress = authority.progress
        self._source = BatchSource(config, buffer, session.keeps, self._say_waiting)
        self._thread = thread
        self._clock = clock or StateClock("wait")
        self._stopping = False
        self._last_end: float | None = None
        self._spool_seconds = self._checkpoint_seconds = 0.0
        self._mismatch_alarm = MismatchAlarm(config.trainer.mismatch_alarm)

    def stop(self) -> None:
        """Finish the step, save, return."""
        self._stopping = True

    async def run(self) -> dict[str, Any]:
        """Train to the end.

        Consumes: legal batches. Produces: steps, published versions, checkpoints. Waits for: the next batch.
        Unblocked by: submitted groups, evictions of due ones, the end of the data, `stop`.

        Returns:
            `reason` (the setting whose limit was reached, `end_of_data` or `stopped`) and the last `step`.

        Raises:
            RunFailedError: too many steps in a row were skipped for safety; the last checkpoint stands.
        """
        try:
            async with asyncio.TaskGroup() as group:
                offering = group.create_task(self._keep_offering())
                group.create_task(self._source.prefetcher.run())
                try:
                    await self._train_steps()
                finally:
                    self._source.prefetcher.end()
                offering.cancel()
                await self._see_last_version_through()
        except* LaminarError as failures:
            raise first_error(failures) from None
        progress = self.progress
        reason = stop_reason(self._config.run, progress) or ("stopped" if self._stopping else "end_of_data")
        return {"reason": reason, "step": progress.step}

    async def _train_steps(self) -> None:
        progress, session = self.progress, self._session
        while stop_reason(self._config.run, progress) is None and not self._stopping:
            taken = await self._next_batch()
            if taken is None:
                break
            await self._step(*taken)
            if progress.step % self._config.checkpoint.every_steps == 0:
                await self._save()
        if session.saved_step != progress.step:
            await self._save()
        await self._steps.flush()

    async def in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run torch work in its one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _next_batch(self) -> tuple[Batch, Frontier] | None:
        """A taken batch, and the data cursor once it is trained; None at the end, or when told to stop."""
        progress = self.progress
        self._clock.enter("wait")
        while True:
            try:
                batch = await self._source.next_batch(progress.lineage, progress.step + 1, lambda: self._stopping)
                if batch is None:
                    return None
                frontier = await self._buffer.frontier()
            except ExperienceError as error:
                await self._reopen(error)
            else:
                return batch, frontier.advance(batch.occurrences, sum(map(len, batch.groups)))

    async def _step(self, batch: Batch, frontier: Frontier) -> None:
        """One batch: train, commit, publish the next number, let the payloads go, report."""
        step, started = self.progress.step + 1, time.time()
        self._clock.enter("train")
        with self._source.ahead():
            report = await self.in_thread(self._train, batch.groups, step, batch.oldest_trained)
        self._clock.enter("spool")
        seconds = await self._commit(batch, frontier, report)
        self._clock.enter("publish")
        published = await self._hand_over(step)
        if report.skipped_reason:
            await self._say_skipped(report.skipped_reason)
        for notice in report.notices:
            await self._telemetry.emit("notice", fields={"text": f"step {step}: {notice}"})
        await self._say_mismatch(report)
        metrics = self._metrics(batch, report, published, step, seconds)
        digest = batch_digest(batch.groups)
        sizes = dict(zip(batch.group_ids, map(len, batch.groups), strict=True))
        left = what_is_left(self._config.run, self.progress, batch.groups_left)
        fields = {"train_started": started, "train_ended": time.time(), "batch": digest, "groups": sizes, "left": left}
        await self._steps.add(metrics, fields)

    async def _commit(self, batch: Batch, frontier: Frontier, report: StepReport) -> float:
        """Write the step into the spool; returns the seconds since the last step was written."""
        now = time.monotonic()
        begin = self._last_end or self._source.first_group_at or now
        after = replace(
            self.progress,
            step=report.step,
            step_seconds=self.progress.step_seconds + now - begin,
            trained_tokens=self.progress.trained_tokens + report.metrics.get("train/tokens", 0.0),
            skipped_steps=self.progress.skipped_steps + bool(report.skipped_reason),
            skipped_in_a_row=self.progress.skipped_in_a_row + 1 if report.skipped_reason else 0,
            recent_rewards=self._recent_rewards(batch, report),
        )
        groups = tuple(map(SpooledGroup, batch.group_ids, batch.occurrences))
        header = SpooledStep(after, frontier, batch_digest(batch.groups), groups, oldest_trained=batch.oldest_trained)
        await self.in_thread(self._session.spool.commit, header, batch.groups)
        self._spool_seconds = time.monotonic() - now
        for field in fields(after):
            setattr(self.progress, field.name, getattr(after, field.name))
        self._authority.frontier, self._last_end = frontier, now
        return now - begin

    def _recent_rewards(self, batch: Batch, report: StepReport) -> tuple[float, ...]:
        """Rewards of the last steps, this one's included: of all groups that ended, where the batch knows them."""
        reward = batch.metrics().get("reward/finished_mean", report.metrics.get("reward/mean"))
        kept = self.progress.recent_rewards if reward is None else (*self.progress.recent_rewards, reward)
        return kept[-self._config.run.stop_at_reward_steps :]

    async def _say_skipped(self, reason: str) -> None:
        """Tell of a skipped step; give up if it is one too many."""
        step, in_a_row = self.progress.step, self.progress.skipped_in_a_row
        await self._telemetry.emit("notice", fields={"text": f"step {step} skipped: {reason}"})
        if in_a_row >= self._config.run.max_skipped_steps:
            raise RunFailedError(
                f"{in_a_row} steps in a row were skipped for safety (run.max_skipped_steps), the last one because {reason}; "
                "the last checkpoint stands"
            )

    async def _say_mismatch(self, report: StepReport) -> None:
        """Warn of what the mismatch alarm finds."""
        if said := self._mismatch_alarm.judge(report.metrics):
            text = f"step {report.step}: {said}"
            logger.warning("%s", text)
            await self._telemetry.emit("notice", fields={"text": text})

    async def _hand_over(self, step: int) -> Published:
        """Tell data module and relay of a committed step; a server that has forgotten the run is told all anew."""
        lineage = self.progress.lineage
        try:
            await self._buffer.publish(lineage, step, trained=True)
            publish = partial(self._publisher.publish, WeightVersion(lineage, step), beside=True)
            published = await self.in_thread(publish)
            await self._buffer.ack(lineage, step)
        except ExperienceError as error:
            return await self._reopen(error)
        return published

    async def _reopen(self, error: ExperienceError) -> Published:
        published = await self._authority.reopen(error)
        await self._steps.repeat()
        return published

    def _train(self, groups: tuple[Group, ...], step: int, oldest_trained: int) -> StepReport:
        self._publisher.supersede()  # in the same thread: a skipped version is never offered with later weights
        return self._session.train(groups, step, oldest_trained, self._publisher.free_weights)

    def _metrics(
        self, batch: Batch, report: StepReport, published: Published, step: int, seconds: float
    ) -> dict[str, float]:
        counters, headers = batch.snapshot.counters, batch.snapshot.headers
        metrics = report.metrics | batch.metrics()
        return metrics | {
            "train/step": step,
            "train/skipped_steps": self.progress.skipped_steps,
            "throughput/trajectories_per_second": batch.num_trained / max(seconds, 1e-9),
            "time/step_seconds": seconds,
            "time/sample_wait_seconds": batch.waited_seconds,
            "time/publish_stall_seconds": published.stall_seconds,
            "time/spool_seconds": self._spool_seconds,
            "time/checkpoint_seconds": self._checkpoint_seconds,
            "weights/publish_bytes": published.num_bytes,
            "weights/publish_bytes_per_second": published.num_bytes / max(published.copy_seconds, 1e-9)
            if published.copy_seconds
            else 0.0,
            "weights/trainer_version": step,
            "weights/skipped_publishes": self._publisher.skipped_publishes,
            "staleness/dropped_groups": self._source.dropped_groups,
            "experience/ready_groups": sum(h.state is GroupState.READY for h in headers),
            "experience/open_groups": sum(h.state is GroupState.IN_FLIGHT for h in headers),
            "experience/bytes": batch.snapshot.reserved_bytes,
            "experience/admitted": counters.admitted,
            "experience/trained": counters.trained,
            "experience/evicted": counters.num_evicted,
            "experience/filtered": counters.filtered,
            "experience/failed": counters.num_failed,
        }

    async def _save(self) -> None:
        """Save a checkpoint: weights, optimizer, frontier and counters of the same step."""
        assert self._authority.frontier is not None
        self._clock.enter("checkpoint")
        began = time.monotonic()
        await self.in_thread(self._session.save, self.progress, self._authority.frontier)
        self._checkpoint_seconds = time.monotonic() - began

    async def _keep_offering(self) -> None:
        """Offer a skipped version again until it is complete or superseded."""
        while True:
            await asyncio.sleep(OFFER_SECONDS)
            if self._publisher.has_unpublished:
                await self.in_thread(self._publisher.offer_again)

    async def _see_last_version_through(self) -> None:
        """At the end: offer the last version until it is complete, for it is what is evaluated."""
        self._clock.enter("publish")
        deadline = time.monotonic() + LAST_OFFER_SECONDS
        await self.in_thread(self._publisher.settle)
        while self._publisher.has_unpublished and time.monotonic() < deadline:
            await self.in_thread(self._publisher.offer_again)
            await asyncio.sleep(OFFER_SECONDS)

    async def _say_waiting(self, text: str) -> None:
        logger.info("waiting for %s", text)
        await self._telemetry.emit("waiting", fields={"text": text})


def batch_digest(groups: Sequence[Group]) -> str:
    """Hash of all sampled token ids in training order: two runs that log the same one trained on the same tokens."""
    segments = [s for group in groups for t in group for chain in t.chains for s in chain.segments if s.is_sampled]
    return xxhash.xxh3_64_hexdigest(b"".join(segment.token_ids.tobytes() for segment in segments))
