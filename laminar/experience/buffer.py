"""The experience buffer: what was played, until it is trained.

Invariants: a trajectory is accepted at most once, whoever plays it and however often it is sent; its payload is written
by the script that accepts it; groups are taken all or none, once; every change of a group's state is one script.

This module does not decide which groups to train, wait for or evict (`laminar.policies.staleness` does).
"""

import asyncio
from collections.abc import Sequence

import msgspec

from laminar.errors import ExperienceError
from laminar.experience.answers import Counters, Frontier, RestoreReport, Snapshot, SubmitOutcome
from laminar.experience.outstanding import Outstanding
from laminar.experience.payloads import fetch_groups
from laminar.experience.store import ExperienceStore, unpack
from laminar.experience.submission import MEMORY_SECONDS, Submission
from laminar.types import EvictionReason, Trajectory, WeightVersion

MAX_REISSUES = 8
"""A prompt that was evicted so often is not issued again."""


class ExperienceBuffer:
    """Submitted groups.

    Args:
        store: the run's data.
        memory_seconds: how long a submit waits for a server whose memory is full.
    """

    def __init__(self, store: ExperienceStore, *, memory_seconds: float = MEMORY_SECONDS) -> None:
        self._store = store
        self._memory_seconds = memory_seconds
        self._outstanding = Outstanding()
        self._peeking = asyncio.Lock()

    async def submit(self, trajectory: Trajectory, worker: str) -> SubmitOutcome:
        """Hand in one finished or failed trajectory; see `submit_many`."""
        return (await self.submit_many([trajectory], worker))[0]

    async def submit_many(
        self, trajectories: Sequence[Trajectory], worker: str, *, together: bool = False
    ) -> list[SubmitOutcome]:
        """Hand in trajectories. A failed one ends its member for good, so the worker retries before it submits a failure.

        Waits, with back-off, while the server's memory is full.

        Args:
            trajectories: finished or failed.
            worker: who played them.
            together: by one script, whatever their size: a death leaves all of them there, or none.

        Raises:
            ExperienceError: the member does not exist, the server is away, or its memory stayed full.
        """
        return await Submission(self._store, worker, self._memory_seconds).run(trajectories, together=together)

    async def peek(self) -> Snapshot:
        """All outstanding groups, and the counters, at one moment; only what changed since the last call is read."""
        async with self._peeking:
            seen = self._outstanding
            packed, stored, gone = await self._store.run("peek", life=seen.life, revision=seen.revision)
            meta = unpack(packed)
            seen.apply(meta["life"], meta["revision"], stored, gone, is_whole=meta["whole"])
            return Snapshot(
                published=WeightVersion(max(meta["lineage"], 0), meta["published"]),
                is_open=meta["open"],
                lineage=meta["lineage"],
                headers=tuple(seen.headers.values()),
                end_of_data=meta["end_of_data"],
                counters=Counters.from_flat(meta["counters"]),
                num_held=meta["held"],
                reserved_bytes=meta["reserved"],
                is_paused=meta.get("paused", False),
                max_staleness=None if meta.get("bound", -1) < 0 else meta["bound"],
                occurrences=dict(seen.occurrences),
                prompts_left=meta.get("prompts_left"),
            )

    async def counters(self) -> Counters:
        """Where all admitted trajectories stand."""
        stored = await self._store.insist("counters", lambda: self._store.client.hgetall(self._store.key("counters")))
        return Counters.from_flat(part for item in stored.items() for part in item)

    async def take(self, lineage: int, step: int, group_ids: Sequence[str]) -> tuple[str, ...]:
        """Take ready groups for a step, all or none.

        Args:
            lineage: of the trainer.
            step: the number it will publish.
            group_ids: in training order.

        Returns:
            The groups of the step: those given, or those that an earlier call took for the same step.

        Raises:
            ExperienceError: a group is not ready or over its bound, the lineage is not open, or the number before is not
                published.
        """
        return tuple(unpack(await self._store.run("take", lineage=lineage, step=step, groups=list(group_ids))))

    async def fetch(self, group_ids: Sequence[str]) -> list[tuple[Trajectory, ...]]:
        """Read groups' good members; failed ones have no payload.

        Returns:
            A tuple for each group, in the given order; members in member order.

        Raises:
            PayloadLostError: a payload is gone; names its trajectory.
        """
        return await fetch_groups(self._store, group_ids)

    async def publish(self, lineage: int, number: int, *, trained: bool = False) -> None:
        """Set the published number, free the slots of its step, and count that step as trained. May be repeated.

        Call it before the weights become visible to engines: a claim with a number not yet published is an error.

        Args:
            lineage: of the trainer.
            number: of the step.
            trained: the trainer has trained groups in this step, so a server that knows of none has forgotten them.

        Raises:
            ExperienceError: the lineage is not open, the number is not the next, or the step's groups are forgotten.
        """
        await self._store.run("publish", lineage=lineage, number=number, trained=trained)

    async def ack(self, lineage: int, step: int) -> None:
        """Delete the payloads of a published step, and of those before it whose ack was lost. May be repeated.

        Raises:
            ExperienceError: the step is not published, or of a dead lineage.
        """
        await self._store.run("ack", lineage=lineage, step=step)

    async def evict(self, group_ids: Sequence[str], reason: EvictionReason, reissue: bool) -> tuple[str, ...]:
        """Let groups go untrained. Groups that are gone already are passed over.

        Args:
            group_ids: in whatever state.
            reason: counted.
            reissue: issue their prompts again as new groups, at most `MAX_REISSUES` times a prompt.

        Returns:
            Those that left now.
        """
        return await self._leave(group_ids, "evicted", reason.value, reissue)

    async def filter(self, group_ids: Sequence[str]) -> tuple[str, ...]:
        """Let groups without signal go, for good.

        Returns:
            Those that left now.

        Raises:
            ExperienceError: a group is in flight.
        """
        return await self._leave(group_ids, "filtered", None, reissue=False)

    async def frontier(self) -> Frontier:
        """The data cursor, for the checkpoint of the number that was published last: call it after that publish."""
        return msgspec.convert(unpack(await self._store.run("frontier")), Frontier)

    async def restore(self, lineage: int, number: int, frontier: Frontier | None = None) -> RestoreReport:
        """Open a lineage at a number; nothing is claimed before. May be repeated. `configure` goes before it.

        Keeps complete groups that the frontier calls untrained and that hold no token newer than `number`; evicts all others
        as orphaned; issues again, once, each prompt that is neither trained at the frontier nor kept. Empty servers do. The
        lineage is open for this life of the server: after its restart or replacement, restore again, with a new lineage.

        Args:
            lineage: 0 at the very first start, then above any before.
            number: the checkpoint's, 0 without one.
            frontier: the checkpoint's; None without one, when nothing is trained.

        Raises:
            ExperienceError: the lineage is not new, or the frontier belongs to another number.
        """
        if number != (frontier.number if frontier else 0):
            raise ExperienceError(
                f"number {number} cannot be restored with the data cursor of number {frontier.number if frontier else 0}; "
                "pass the frontier that was saved with the checkpoint"
            )
        packed = await self._store.run(
            "restore", lineage=lineage, number=number, frontier=(frontier or Frontier()).to_json()
        )
        return RestoreReport(**unpack(packed))

    async def _leave(self, group_ids: Sequence[str], bucket: str, reason: str | None, reissue: bool) -> tuple[str, ...]:
        packed = await self._store.run(
            "evict", groups=list(group_ids), bucket=bucket, reason=reason, reissue=reissue, max_reissues=MAX_REISSUES
        )
        return tuple(unpack(packed))
