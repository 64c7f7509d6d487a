"""Payloads of complete groups, fetched while a step trains, so that they are here when the next batch is chosen.

It decides nothing: what is fetched is judged, chosen or let go by `trainer.sampling`, at the version it will be trained on.
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Sequence

from laminar.errors import ExperienceError
from laminar.experience.buffer import ExperienceBuffer
from laminar.types import GroupState, Trajectory

LOOK_SECONDS = 0.2
Group = tuple[Trajectory, ...]


class Prefetcher:
    """Reads groups' members, ahead where it can."""

    def __init__(self, buffer: ExperienceBuffer) -> None:
        self._buffer = buffer
        self._groups: dict[str, Group] = {}
        self._known: Collection[str] = ()
        self._is_wanted, self._has_ended = asyncio.Event(), False

    async def fetch(self, group_ids: Sequence[str]) -> list[Group]:
        """The groups, in that order; those that are not here yet are read.

        Raises:
            PayloadLostError: a payload is gone; names its trajectory.
        """
        missing = [group_id for group_id in group_ids if group_id not in self._groups]
        if missing:
            self._groups |= dict(zip(missing, await self._buffer.fetch(missing), strict=True))
        return [self._groups.pop(group_id) for group_id in group_ids]

    @contextlib.contextmanager
    def ahead(self, known: Collection[str]) -> Iterator[None]:
        """Let `run` read for the length of the block.

        Args:
            known: groups whose members the sampler has already.
        """
        self._known = known
        self._is_wanted.set()
        try:
            yield
        finally:
            self._is_wanted.clear()

    async def run(self) -> None:
        """Consumes: ready groups. Produces: their members. Waits for: a step that trains. Unblocked by: `end`."""
        while not self._has_ended:
            await self._is_wanted.wait()
            with contextlib.suppress(ExperienceError):  # the next batch meets what is wrong by itself
                await self._read_ready()
            await asyncio.sleep(LOOK_SECONDS)

    def end(self) -> None:
        """Let `run` return."""
        self._has_ended = True
        self._is_wanted.set()

    async def _read_ready(self) -> None:
        headers = (await self._buffer.peek()).headers
        ready = [header.group_id for header in headers if header.state is GroupState.READY]
        self._groups = {group_id: self._groups[group_id] for group_id in ready if group_id in self._groups}
        new = [group_id for group_id in ready if group_id not in self._groups and group_id not in self._known]
        for group_id in new:
            (self._groups[group_id],) = await self._buffer.fetch([group_id])
