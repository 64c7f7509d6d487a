"""The other replicas, as one worker's trajectories find them: who has room at which version, and a seat there.

It knows the directory and the doors, not trajectories.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from laminar.directory import ReplicaDirectory, ReplicaEntry
from laminar.types import WeightVersion
from rollout.guest_client import GuestSeat, take_seat
from rollout.guest_wire import Sit

logger = logging.getLogger("laminar.rollout.harbour")

MAX_REFUGES = 4
"""Replicas that are asked, of each kind, before a trajectory waits for its own engine."""


class Harbour:
    """See the module.

    Args:
        directory: of the run.
        token: the run's.
        request_seconds: deadline of one answer.
        move_seconds: deadline of one move.

    Attributes:
        url: our own door; empty until it is open.
    """

    def __init__(self, directory: ReplicaDirectory, *, token: str, request_seconds: float, move_seconds: float) -> None:
        self.url = ""
        self.move_seconds = move_seconds
        self._directory, self._token, self._request_seconds = directory, token, request_seconds
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task[Any]] = set()

    async def refuges(self, version: WeightVersion | None, *, not_at: str) -> tuple[list[str], list[str]]:
        """Doors of other replicas: those that hold this version, and those that hold a newer one; the emptiest first."""
        others = [
            entry for entry in await self._directory.entries() if entry.version and entry.url not in (not_at, self.url)
        ]
        others.sort(key=_share)
        same = [e.url for e in others if version is not None and e.version == str(version)]
        newer = [e.url for e in others if version is None or WeightVersion.parse(e.version) > version]
        return same[:MAX_REFUGES], newer[:MAX_REFUGES]

    async def take(self, url: str, sit: Sit, on_move_on: Callable[[str], None]) -> GuestSeat:
        """Take a seat at the replica whose door is there.

        Raises:
            SeatRefusedError: it has none, or is not there.
        """
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._token}"}
            connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)
        seconds, request_seconds = self.move_seconds, self._request_seconds
        return await take_seat(self._session, url, sit, on_move_on, seconds=seconds, request_seconds=request_seconds)

    def in_background(self, work: "Coroutine[Any, Any, Any]") -> None:
        """Run a move that nobody waits for; `close` ends it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """End what runs in the background, and all sockets."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._session is not None:
            await self._session.close()
            self._session = None


def _share(entry: ReplicaEntry) -> float:
    return entry.context_tokens / max(entry.capacity_tokens, 1)
