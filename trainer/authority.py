"""The trainer as authority over what is trained: it opens a lineage in the data module, at its own number and data cursor.

At start, after a resume, and whenever the server was restarted, lost its newest writes or was replaced by an empty one. The
weights come first, under the new lineage, then the data module: no engine can claim with a version that is not there.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from laminar.errors import ExperienceError
from laminar.experience.answers import Frontier, RestoreReport
from laminar.experience.buffer import ExperienceBuffer
from laminar.telemetry.stream import TelemetryWriter
from laminar.types import WeightVersion
from trainer.progress import Progress
from trainer.publishing import Published, WeightPublisher
from trainer.sampling import stands_at

logger = logging.getLogger("laminar.trainer.authority")

OPEN_SECONDS = 60.0
"""How long a replaced server may take to be configured by the supervisor."""
PAUSE_SECONDS = 0.1


class Authority:
    """Opens lineages for one life of the trainer.

    Args:
        buffer: the data module.
        publisher: of the trainer's weights.
        newest_version: the newest version that the relay of this machine holds.
        telemetry: told of each opening.
        thread: where torch work runs.
        progress: where the trainer stands; `lineage` is set here.
        frontier: the data cursor at `progress.step`; None at step 0.

    Attributes:
        frontier: the same, kept up to date by the loop.
    """

    def __init__(
        self,
        buffer: ExperienceBuffer,
        publisher: WeightPublisher,
        newest_version: Callable[[], WeightVersion | None],
        telemetry: TelemetryWriter,
        thread: ThreadPoolExecutor,
        progress: Progress,
        frontier: Frontier | None,
    ) -> None:
        self._buffer, self._publisher, self._newest_version = buffer, publisher, newest_version
        self._telemetry, self._thread = telemetry, thread
        self.progress, self.frontier = progress, frontier

    async def open(self, num_replayed: int = 0) -> Published:
        """Publish the weights under a new lineage and restore the data module at their number.

        The lineage is above every one that left a trace: in the checkpoint, the data module, or the relay's store.

        Args:
            num_replayed: steps trained again before, for the report.

        Raises:
            ExperienceError: the server refuses, or is not configured in time.
        """
        progress, deadline = self.progress, time.monotonic() + OPEN_SECONDS
        published: Published | None = None
        while True:
            lineage = (await self._buffer.peek()).lineage
            if published is None or lineage >= progress.lineage:
                newest = self._newest_version()
                progress.lineage = max(progress.lineage, lineage, newest.lineage if newest else -1) + 1
                version = WeightVersion(progress.lineage, progress.step)
                published = await asyncio.get_running_loop().run_in_executor(self._thread, self._publisher.publish, version)
            try:
                report = await self._buffer.restore(progress.lineage, progress.step, self.frontier)
                break
            except ExperienceError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(PAUSE_SECONDS)
        await self._tell(report, num_replayed)
        return published

    async def reopen(self, error: ExperienceError) -> Published:
        """After an error of the data module: open a new lineage if the server has forgotten where the trainer stands.

        Raises:
            ExperienceError: the same, if the server knows the trainer, or belongs to another one by now.
        """
        own = WeightVersion(self.progress.lineage, self.progress.step)
        snapshot = await self._buffer.peek()
        if stands_at(snapshot, own) or snapshot.lineage > own.lineage:
            raise error
        logger.warning("%s: opening a new lineage", error)
        return await self.open()

    async def _tell(self, report: RestoreReport, num_replayed: int) -> None:
        progress = self.progress
        text = (
            f"lineage {progress.lineage} opens at step {progress.step}: {num_replayed} steps replayed, {report.kept} groups "
            f"kept, {report.reissued} prompts to be generated again, {report.lost} lost"
        )
        logger.log(logging.ERROR if report.lost else logging.INFO, text)
        metrics = {
            "resume/replayed_steps": num_replayed,
            "resume/kept_groups": report.kept,
            "resume/regenerated_prompts": report.reissued,
            "resume/lost_prompts": report.lost,
        }
        await self._telemetry.emit(
            "restored", metrics, fields={"step": progress.step, "lineage": progress.lineage, "text": text}
        )
