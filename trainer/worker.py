"""A trainer rank as a process: meets the others, loads the newest state, replays steps, opens a lineage, runs the loop.

Rank 0 decides and talks to the data module and the relay; the other ranks follow its commands. A rank that dies takes all
along: the supervisor starts them together from the newest checkpoint.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.errors import DeadlineError
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.store import ExperienceStore
from laminar.telemetry.clock import StateClock, emit_clock, report_clock
from laminar.telemetry.stream import TelemetryWriter
from laminar.types import Trajectory
from relay.publisher import Publisher
from relay.store import open_store
from trainer.authority import Authority
from trainer.emulated import EmulatedSession
from trainer.loop import TrainingLoop
from trainer.publishing import WeightPublisher
from trainer.session import Session, TrainingSession
from trainer.spool_file import SpooledStep
from trainer.step import StepReport

logger = logging.getLogger("laminar.trainer.worker")

Result = TypeVar("Result")

CONNECT_SECONDS = 60.0
FETCH_SECONDS = 120.0
MEETING_POLL_SECONDS = 0.05


class TrainerRank:
    """One rank."""

    def __init__(self, context: RoleContext, config: LaminarConfig, rank: int, meeting: str) -> None:
        self._context, self._config, self._rank, self._meeting = context, config, rank, meeting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._stop_asked = False
        self._clock = StateClock("start")

    async def start(self) -> None:
        """Meet and load."""
        self._event_loop = asyncio.get_running_loop()
        self._redis = await connect(self._context.redis_url, patience_seconds=CONNECT_SECONDS)
        self._buffer = ExperienceBuffer(ExperienceStore(self._redis, self._context.run_id))
        store = await self._meet()
        self._session = await self._in_thread(self._load, store)

    async def restore(self) -> None:
        """Replay the steps after the checkpoint and, on rank 0, publish the version that workers start from.

        May take as long as those steps took; each is told, and counts as progress.
        """
        self._telemetry = TelemetryWriter(self._redis, self._context.run_id, self._context.role)
        self._clock.enter("restore")
        await self._in_thread(self._session.replay, self._say_replayed)
        if self._rank == 0:
            await self._open_lineage()
        else:  # from here on: rank 0 may need all ranks for its first publish
            self._following = asyncio.create_task(self._in_thread(self._session.follow, self._clock.enter))

    async def run(self) -> dict[str, Any]:
        """Train to the end, or follow rank 0 there; returns its closing words."""
        reporting = asyncio.create_task(report_clock(self._clock, self._telemetry))
        try:
            return await self._work()
        finally:
            reporting.cancel()
            await emit_clock(self._clock, self._telemetry)
            await self._redis.aclose()

    async def _work(self) -> dict[str, Any]:
        if self._rank != 0:
            await self._following
            return {}
        if self._stop_asked:
            self._loop.stop()
        result = await self._loop.run()
        await self._in_thread(self._session.dismiss)
        return result

    async def stop(self) -> None:
        """Finish the step, save, return."""
        self._stop_asked = True
        if hasattr(self, "_loop"):
            self._loop.stop()

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _meet(self) -> Store | None:
        """The store where ranks meet: rank 0 binds a port of the system's choice and publishes it under the meeting's name.

        Raises:
            DeadlineError: rank 0 does not publish it in time.
        """
        trainer = self._config.trainer
        if trainer.num_ranks == 1:
            return None
        key = f"laminar:{self._context.run_id}:directory:trainer:{self._meeting}"
        if self._rank == 0:
            store = self._tcp_store(self._context.node_address, 0, is_master=True)
            await self._redis.set(key, f"{self._context.node_address} {store.port}", ex=int(trainer.start_seconds))
            return store
        deadline = time.monotonic() + trainer.start_seconds
        while (address := await self._get(key)) is None:
            if time.monotonic() > deadline:
                raise DeadlineError("trainer rank 0 to publish where ranks meet", trainer.start_seconds)
            await asyncio.sleep(MEETING_POLL_SECONDS)
        host, port = address.decode().split()
        return await self._in_thread(lambda: self._tcp_store(host, int(port), is_master=False))

    async def _get(self, key: str) -> bytes | None:
        value: Any = await self._redis.get(key)
        return None if value is None else bytes(value)

    def _tcp_store(self, host: str, port: int, *, is_master: bool) -> TCPStore:
        trainer = self._config.trainer
        timeout = timedelta(seconds=trainer.start_seconds)
        return TCPStore(host, port, trainer.num_ranks, is_master=is_master, timeout=timeout, wait_for_workers=False)

    def _load(self, store: Store | None) -> Session:
        checkpoints = self._context.run_folder / "checkpoints"
        if self._config.trainer.kind == "emulated":
            return EmulatedSession(self._config, checkpoints)
        return TrainingSession(self._config, checkpoints, self._rank, store, self._fetch, self._context.node_id)

    def _fetch(self, group_ids: Sequence[str]) -> list[tuple[Trajectory, ...]]:
        """Get groups from the torch thread; the connection belongs to the event loop."""
        request = asyncio.run_coroutine_threadsafe(self._buffer.fetch(group_ids), self._event_loop)
        return request.result(FETCH_SECONDS)

    def _say_replayed(self, header: SpooledStep, report: StepReport) -> None:
        """From the torch thread: a replayed step, which the observer adds only if its first life could not tell it."""
        logger.info("step %s replayed", header.step)
        now = time.time()
        metrics = report.metrics | {"train/step": header.step, "train/skipped_steps": header.progress.skipped_steps}
        fields = {"train_started": now, "train_ended": now, "batch": header.batch}
        telling = self._telemetry.emit("step", metrics, fields=fields)
        asyncio.run_coroutine_threadsafe(telling, self._event_loop).result(FETCH_SECONDS)

    async def _open_lineage(self) -> None:
        """Publish the weights under a new lineage, let the data module go on from their number, make the loop."""
        session, buffer, telemetry = self._session, self._buffer, self._telemetry
        weights = open_store(self._config, self._context.run_id, self._context.node_id)
        relay = Publisher(weights, Path(self._config.model.path))
        publisher = WeightPublisher(relay, session, lambda: session.probe, session.fill)
        authority = Authority(buffer, publisher, weights.newest, telemetry, self._thread, session.progress, session.frontier)
        await authority.open(len(session.replayed))
        self._loop = TrainingLoop(self._config, session, publisher, buffer, telemetry, authority, self._thread, self._clock)
