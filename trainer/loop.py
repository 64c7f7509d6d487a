"""Rank 0's loop: sample, train, publish, acknowledge, save.

The loop is asynchronous only so that `stop` and telemetry get through; all torch work runs in one thread, one piece after
another. Nothing here waits for rollouts but `BatchSource.next_batch`, and that waits by name and by deadline.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import xxhash

from laminar.config.root import LaminarConfig
from laminar.experience.buffer import ExperienceBuffer
from laminar.telemetry.stream import TelemetryWriter
from laminar.types import GroupState, WeightVersion
from trainer.publishing import Published, WeightPublisher
from trainer.sampling import Batch, BatchSource, Group
from trainer.session import Progress, TrainingSession
from trainer.step import StepReport

logger = logging.getLogger("laminar.trainer.loop")

Result = TypeVar("Result")

OFFER_SECONDS = 0.2
"""Pause between offers of a version that found no free slot."""


class TrainingLoop:
    """Trains from the buffer until the steps or the data end, or somebody says stop."""

    def __init__(
        self,
        config: LaminarConfig,
        session: TrainingSession,
        publisher: WeightPublisher,
        buffer: ExperienceBuffer,
        telemetry: TelemetryWriter,
        progress: Progress,
        thread: ThreadPoolExecutor,
    ) -> None:
        self._config, self._session, self._publisher = config, session, publisher
        self._buffer, self._telemetry = buffer, telemetry
        self.progress = progress
        self._source = BatchSource(config, buffer, session.algorithm.keeps, self._say_waiting)
        self._thread = thread
        self._stopping = False
        self._last_end: float | None = None

    def stop(self) -> None:
        """Finish the step, save, return."""
        self._stopping = True

    async def run(self) -> dict[str, Any]:
        """Train to the end.

        Consumes: legal batches. Produces: steps, published versions, checkpoints. Waits for: the next batch.
        Unblocked by: submitted groups, evictions of due ones, the end of the data, `stop`.

        Returns:
            `reason` (`max_steps`, `end_of_data` or `stopped`) and the last `step`.
        """
        progress, saved = self.progress, self.progress.step
        offering = asyncio.create_task(self._keep_offering())
        try:
            while progress.step < self._config.run.max_steps and not self._stopping:
                batch = await self._source.next_batch(progress.lineage, progress.step + 1, lambda: self._stopping)
                if batch is None:
                    break
                await self._step(batch)
                if progress.step % self._config.checkpoint.every_steps == 0:
                    saved = await self._save()
            if saved != progress.step:
                await self._save()
        finally:
            offering.cancel()
        done = progress.step >= self._config.run.max_steps
        return {"reason": "max_steps" if done else "stopped" if self._stopping else "end_of_data", "step": progress.step}

    async def in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run torch work in its one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _step(self, batch: Batch) -> None:
        """One batch: train, publish the next number, let the payloads go, report."""
        progress = self.progress
        step = progress.step + 1
        started = time.time()
        report = await self.in_thread(self._train, batch.groups, step)
        await self._buffer.publish(progress.lineage, step)
        published = await self.in_thread(self._publisher.publish, WeightVersion(progress.lineage, step))
        ended = time.time()
        await self._buffer.ack(progress.lineage, step)
        now = time.monotonic()
        begin = self._last_end or self._source.first_group_at or now
        seconds, self._last_end = now - begin, now
        progress.step = step
        progress.step_seconds += seconds
        progress.trained_tokens += report.metrics.get("train/tokens", 0.0)
        if report.skipped_reason:
            progress.skipped_steps += 1
            await self._telemetry.emit("notice", fields={"text": f"step {step} skipped: {report.skipped_reason}"})
        metrics = self._metrics(batch, report, published, step, seconds)
        await self._telemetry.emit(
            "step", metrics, fields={"train_started": started, "train_ended": ended, "batch": batch_digest(batch.groups)}
        )

    def _train(self, groups: tuple[Group, ...], step: int) -> StepReport:
        self._publisher.supersede()  # in the same thread: a skipped version is never offered with later weights
        return self._session.train(groups, step)

    def _metrics(
        self, batch: Batch, report: StepReport, published: Published, step: int, seconds: float
    ) -> dict[str, float]:
        counters, headers = batch.snapshot.counters, batch.snapshot.headers
        metrics = report.metrics | batch.metrics()
        return metrics | {
            "train/step": step,
            "train/skipped_steps": self.progress.skipped_steps,
            "throughput/trajectories_per_second": sum(map(len, batch.groups)) / max(seconds, 1e-9),
            "time/step_seconds": seconds,
            "time/sample_wait_seconds": batch.waited_seconds,
            "time/publish_stall_seconds": published.stall_seconds,
            "weights/publish_bytes": published.num_bytes,
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

    async def _save(self) -> int:
        """Save a checkpoint: weights, optimizer, frontier and counters of the same step."""
        frontier = await self._buffer.frontier()
        await self.in_thread(self._session.save, self.progress, frontier)
        return self.progress.step

    async def _keep_offering(self) -> None:
        """Offer a skipped version again until it is complete or superseded."""
        while True:
            await asyncio.sleep(OFFER_SECONDS)
            if self._publisher.has_unpublished:
                await self.in_thread(self._publisher.offer_again)

    async def _say_waiting(self, text: str) -> None:
        logger.info("waiting for %s", text)
        await self._telemetry.emit("waiting", fields={"text": text})


def batch_digest(groups: Sequence[Group]) -> str:
    """Hash of all sampled token ids in training order: two runs that log the same one trained on the same tokens."""
    segments = [s for group in groups for t in group for chain in t.chains for s in chain.segments if s.is_sampled]
    return xxhash.xxh3_64_hexdigest(b"".join(segment.token_ids.tobytes() for segment in segments))
