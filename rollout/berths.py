"""The open trajectories of one engine: who comes in, who has left, and when the engine may swap.

Invariant: `bind`, `admit_guest` and `close_for_swap` exclude each other through one condition; nobody comes in between the
moment the last one has left and the end of the swap. It does not know engines' processes or requests.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from laminar.config.rollout import EngineConfig
from laminar.errors import LaminarError
from laminar.types import WeightVersion
from rollout.occupants import GuestLimits, Occupant
from rollout.waiting import wait_until


class SeatRefusedError(LaminarError):
    """A replica does not take a guest in: no room, other weights, or none."""


class Berths:
    """See the module.

    Args:
        changed: notified of every change; whoever tells of the version shares it.
        held: the version that the engine holds; None while that is unknown.
        config: of the engine.
        on_change: called at every change.

    Attributes:
        occupants: the open trajectories, guests included.
        num_admitted: trajectories of our own so far.
        is_closed: whether nothing new is admitted, because the engine drains for a swap.
    """

    def __init__(
        self,
        changed: asyncio.Condition,
        held: Callable[[], WeightVersion | None],
        config: EngineConfig,
        on_change: Callable[[], None],
    ) -> None:
        self._changed, self._held, self._config, self._on_change = changed, held, config, on_change
        self._sealed = False
        self._hold_seconds = 0.0
        self.occupants: set[Occupant] = set()
        self.num_admitted = 0
        self.is_closed = False

    @contextlib.asynccontextmanager
    async def bind(self, *, waits: bool = True) -> AsyncIterator[Occupant]:
        """Hold one open trajectory.

        Args:
            waits: a replica that is closed for a swap lets it wait until that has happened; if not, it joins those that the
                swap waits for.

        Raises:
            DeadlineError: the swap takes too long.
        """
        occupant = await self.admit(waits=waits)
        try:
            yield occupant
        finally:
            await self.leave(occupant)

    async def admit(self, *, waits: bool = True) -> Occupant:
        """Open a trajectory of our own, as `bind`; `leave` closes it."""
        if waits and self.is_closed:
            seconds = self._hold_seconds + self._config.start_seconds
            await wait_until(self._changed, lambda: not self.is_closed, "a swap before which nothing is admitted", seconds)
        self.num_admitted += 1
        occupant = Occupant()
        self.occupants.add(occupant)
        return occupant

    async def admit_guest(
        self, version: WeightVersion | None, context_tokens: int, limits: GuestLimits
    ) -> tuple[Occupant, WeightVersion]:
        """Open another worker's trajectory here; `leave` closes it. One that drains takes guests until it is empty.

        Args:
            version: what the engine must hold; None: any.
            context_tokens: of the trajectory.
            limits: what is to hold with it.

        Returns:
            Its place, and the version that the engine holds.

        Raises:
            SeatRefusedError: there is no room, or the weights are other ones, unknown, or just being exchanged.
        """
        async with self._changed:
            held = self._held()
            if held is None or self._sealed:
                raise SeatRefusedError("the engine's weights are being exchanged")
            if version is not None and version != held:
                raise SeatRefusedError(f"the engine holds {held}, not {version}")
            if reason := limits.refusal(self.occupants, context_tokens, self._config.max_cached_tokens):
                raise SeatRefusedError(reason)
            occupant = Occupant(is_guest=True, context_tokens=context_tokens)
            self.occupants.add(occupant)
            return occupant, held

    async def leave(self, occupant: Occupant) -> None:
        """Close a trajectory here; harmless when repeated."""
        self.occupants.discard(occupant)
        self._on_change()
        async with self._changed:
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def close_for_swap(self, max_hold_seconds: float) -> AsyncIterator[bool]:
        """Admit nothing and wait until no trajectory is open; yields whether that happened in time."""
        self.is_closed, self._hold_seconds = True, max_hold_seconds
        self._on_change()
        try:
            yield await self._drain(max_hold_seconds)
        finally:
            async with self._changed:
                self.is_closed = self._sealed = False
                self._on_change()
                self._changed.notify_all()

    async def _drain(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: not self.occupants)
                self._sealed = True
        except TimeoutError:
            return False
        return True
