"""Puts by what a worker's running trajectories have sampled, all of them in one pipeline, so that another can go on.

Invariant: sampling never waits for it. A server that is slow, or short of memory, makes batches larger, not episodes longer.
It does not know engines or episodes.
"""

import asyncio

from laminar.experience.partial import Partial, PartialPool
from laminar.types import ClaimedGroup
from rollout.journal import Journal

MAX_PIECES = 256
"""Appends in one pipeline."""


class PartialRecorder:
    """One worker's recorder.

    Args:
        pool: where batches go.
        batch_tokens: tokens in a batch; 0 switches everything off.
        is_resumable: whether another worker could go on with an episode; if not, nothing is put by.
    """

    def __init__(self, pool: PartialPool, *, batch_tokens: int, is_resumable: bool) -> None:
        self._pool = pool
        self._batch_tokens, self._is_resumable = batch_tokens, is_resumable
        self._full: dict[Journal, None] = {}  # a set that keeps its order
        self._work = asyncio.Event()

    async def adopt(self, group: ClaimedGroup) -> dict[int, Partial]:
        """What earlier owners have left of a claimed group, by member."""
        if group.claim == 1 or not (self._batch_tokens and self._is_resumable):
            return {}
        return await self._pool.adopt(group.group_id, group.claim)

    def open(self, group: ClaimedGroup, member: int, attempt: int, saved: Partial | None) -> Journal | None:
        """A journal for one attempt at a member; None if nothing is to be kept of it, not even through an engine's death."""
        if not self._batch_tokens:
            return None
        on_batch = self._note_full if self._is_resumable else None
        return Journal(group, member, attempt, batch_tokens=self._batch_tokens, on_batch=on_batch, saved=saved)

    async def run(self) -> None:
        """Append what is full.

        Consumes: full journals. Produces: appends. Waits for: a full journal; then for the server.
        """
        while True:
            await self._work.wait()
            journals = list(self._full)[:MAX_PIECES]
            for journal in journals:
                del self._full[journal]
            if not self._full:
                self._work.clear()
            batches = [(journal, piece) for journal in journals if (piece := journal.batch()) is not None]
            if not batches:
                continue
            outcomes = await self._pool.append([piece for _, piece in batches])
            for (journal, piece), outcome in zip(batches, outcomes, strict=True):
                journal.settle(piece, outcome)

    def _note_full(self, journal: Journal) -> None:
        self._full[journal] = None
        self._work.set()
