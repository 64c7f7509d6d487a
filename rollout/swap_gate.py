"""Who goes first on one replica: an evaluation of the version that it holds, or the swap to the next one.

Invariants: the two exclude each other; a swap lets every evaluation go first that waits for the version just held, so an
asked-for version is not swapped away between its arrival and its evaluation. Training's requests pass freely.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from laminar.errors import EngineError
from rollout.replica import Replica


class SwapGate:
    """The gate of one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._lock = asyncio.Lock()
        self._wanted: list[int] = []
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def evaluation(self, min_number: int, *, wait_seconds: float, seconds: float) -> AsyncIterator[None]:
        """Hold a version of at least this number for the length of the block.

        Args:
            min_number: of the version.
            wait_seconds: longest wait for it.
            seconds: longest duration from then on, a swap under way included.

        Raises:
            DeadlineError: the version did not come in time.
            EngineError: the block took longer.
        """
        self._wanted.append(min_number)
        try:
            await self._replica.wait_number(min_number, wait_seconds)
            async with asyncio.timeout(seconds), self._lock:
                await self._replica.wait_ready(seconds)
                yield
        except TimeoutError:
            raise EngineError(f"the evaluation took longer than {seconds:g} s (eval.timeout_seconds)") from None
        finally:
            async with self._changed:
                self._wanted.remove(min_number)
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def swap(self) -> AsyncIterator[None]:
        """Keep evaluations out for the length of the block, once those of the held version have ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_wanted())
        async with self._lock:
            yield

    def _is_wanted(self) -> bool:
        version = self._replica.version
        return version is not None and any(number <= version.number for number in self._wanted)
