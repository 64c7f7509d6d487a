"""Where one trajectory is generated: on its home replica, or as a guest of another. The episode does not notice.

A move takes a seat at the destination, ends the request at the source, keeps what it answers, and lets the next request go
to the new seat (DESIGN section 8). Invariants:
- one owner: at most one request of a trajectory is on its way, and it counts as open wherever it has a seat, so for the
  moment of a move at both ends: neither can swap under it;
- exact: what the source answers is what was sampled, whatever its finish reason: an answer that was complete in the same
  moment settles the race;
- an episode hears of a move only by tokens: one that interrupts a request before its first token is no abort to it;
- a move that fails, at any point, leaves the trajectory where it was; one to where it is does nothing.

It does not know who decides on moves.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import Protocol

from laminar.errors import DeadlineError, EngineError
from laminar.types import FinishReason, Int32Array, SamplingParameters, Segment, WeightVersion
from rollout.berths import SeatRefusedError
from rollout.generation import Generation, OnSegment
from rollout.guest_wire import Sit
from rollout.harbour import Harbour
from rollout.occupants import Occupant
from rollout.replica import Replica
from rollout.waiting import wait_until

logger = logging.getLogger("laminar.rollout.seat")

ABORT_AGAIN_SECONDS = 0.5
"""An abort that overtook its request, or was lost, is repeated."""


class Place(Protocol):
    """A replica, as one trajectory sees it."""

    @property
    def url(self) -> str:
        """Its door."""
        ...

    @property
    def version(self) -> WeightVersion | None:
        """What its engine holds; None while that is unknown."""
        ...

    @property
    def is_well(self) -> bool:
        """Whether it can generate, now or soon."""
        ...

    @property
    def life(self) -> int:
        """Which of its engines in a row it has."""
        ...

    async def generate(
        self, input_ids: Int32Array, sampling: SamplingParameters, request_id: str, on_segment: OnSegment | None = None, /
    ) -> Generation:
        """As `Generator.generate`."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its answer comes."""
        ...

    async def leave(self) -> None:
        """Close the trajectory there; harmless when repeated."""
        ...


class HomePlace:
    """The replica of the trajectory's own worker."""

    def __init__(self, replica: Replica, occupant: Occupant, url: str) -> None:
        self.url = url
        self._replica, self._occupant = replica, occupant

    @property
    def version(self) -> WeightVersion | None:
        """What the engine holds."""
        return self._replica.version

    @property
    def is_well(self) -> bool:
        """Whether the engine is not dead or being restarted."""
        return not self._replica.is_down

    @property
    def life(self) -> int:
        """Counts restarts."""
        return self._replica.restarts

    async def generate(
        self, input_ids: Int32Array, sampling: SamplingParameters, request_id: str, on_segment: OnSegment | None = None, /
    ) -> Generation:
        """As `Replica.generate`, and keep the books."""
        occupant, streamed = self._occupant, 0

        def hear(segment: Segment) -> None:
            nonlocal streamed
            streamed += len(segment)
            occupant.grow(len(segment))
            if on_segment is not None:
                on_segment(segment)

        occupant.begin(len(input_ids), sampling.max_new_tokens)
        generation = await self._replica.generate(input_ids, sampling, request_id, None if on_segment is None else hear)
        occupant.grow(generation.num_tokens - streamed)
        return generation

    async def abort(self, request_id: str) -> None:
        """End a request."""
        await self._replica.abort(request_id)

    async def leave(self) -> None:
        """Close the trajectory here."""
        await self._replica.berths.leave(self._occupant)


class Seat:
    """One open trajectory's place; a `Generator`. Made by `Seats.open`."""

    def __init__(self, replica: Replica, harbour: Harbour, home: HomePlace, group_id: str) -> None:
        self.group_id = group_id
        self._replica, self._harbour = replica, harbour
        self._place: Place = home
        self._context_tokens = self._sampled_tokens = 0
        self._version: WeightVersion | None = None
        self._request_id = ""
        self._changed = asyncio.Condition()
        self._is_moving = self._has_ended = False

    @property
    def url(self) -> str:
        """The door of the replica where it is."""
        return self._place.url

    async def generate(
        self, input_ids: Int32Array, sampling: SamplingParameters, request_id: str, on_segment: OnSegment | None = None, /
    ) -> Generation:
        """Continue `input_ids` (T,) int32 where the trajectory is; first elsewhere, if that replica is down.

        Raises:
            EngineError: the engine answered wrongly. One that died before the first token answers nothing, as aborted.
            DeadlineError: it did not answer in time.
        """
        while True:
            generation, was_moved = await self._ask(input_ids, sampling, request_id, on_segment)
            if generation.num_tokens or generation.finish_reason is not FinishReason.ABORT or not was_moved:
                return generation
            # nothing was sampled before the move; the episode would take such an abort for an engine that fails

    async def _ask(
        self, input_ids: Int32Array, sampling: SamplingParameters, request_id: str, on_segment: OnSegment | None
    ) -> tuple[Generation, bool]:
        """One request, and whether a move ended it."""
        await wait_until(self._changed, lambda: not self._is_moving, "a move to end", self._harbour.move_seconds * 2)
        self._context_tokens = len(input_ids)
        if not self._place.is_well:
            await self._flee()
        self._request_id, life = request_id, self._place.life
        try:
            generation = await self._place.generate(input_ids, sampling, request_id, on_segment)
        except EngineError as error:
            if self._place.is_well and self._place.life == life:
                raise
            logger.info("request %s: %s; it goes elsewhere", request_id, error)
            generation = Generation((), FinishReason.ABORT)
        finally:
            was_moved = self._is_moving
            async with self._changed:
                self._request_id = ""
                self._changed.notify_all()
        self._context_tokens += generation.num_tokens
        self._sampled_tokens += generation.num_tokens
        self._version = generation.segments[-1].version if generation.segments else self._version
        return generation, was_moved

    async def move(self, url: str) -> bool:
        """Go to the replica whose door is there; whether it is there now. In the middle of another move nothing happens.

        What is not done within the harbour's deadline is undone.
        """
        version = self._place.version
        if self._is_moving or self._has_ended or version is None or self._place.url == url:
            return self._place.url == url
        self._is_moving = True
        try:
            async with asyncio.timeout(self._harbour.move_seconds), AsyncExitStack() as undo:
                seat = await self._harbour.take(url, self._sit(version), self.move_on)
                undo.push_async_callback(seat.leave)
                await self._interrupt()
                if self._has_ended or not seat.is_well:
                    return False
                undo.pop_all()
                left, self._place = self._place, seat
        except (SeatRefusedError, EngineError, DeadlineError, TimeoutError) as error:
            logger.info("a move to %s came to nothing: %s", url, error or "out of time")
            return False
        finally:
            async with self._changed:
                self._is_moving = False
                self._changed.notify_all()
        await left.leave()
        return True

    def move_on(self, url: str) -> None:
        """The host wants to be empty: move in the background."""
        self._harbour.in_background(self.move(url))

    async def close(self) -> None:
        """The trajectory has ended, or nobody wants it any more."""
        self._has_ended = True
        await self._place.leave()

    async def _interrupt(self) -> None:
        """End the request that is on its way, and wait for its answer, which the episode gets."""
        while self._request_id:
            await self._place.abort(self._request_id)
            with contextlib.suppress(DeadlineError):
                await wait_until(
                    self._changed, lambda: not self._request_id, "an aborted request to end", ABORT_AGAIN_SECONDS
                )

    async def _flee(self) -> None:
        """Take a seat elsewhere: at the same version if there is one, else at home if that is well, else at a newer one.

        With none of these the trajectory waits at home until the engine is back.
        """
        version = self._version or self._place.version
        same, newer = await self._harbour.refuges(version, not_at=self._place.url)
        is_home = isinstance(self._place, HomePlace)
        for urls, wanted in ((same, version), ((), None) if is_home else (("",), None), (newer, None)):
            for url in urls:
                if await self._settle(url, wanted):
                    return
        if not is_home:
            await self._go_home()

    async def _settle(self, url: str, version: WeightVersion | None) -> bool:
        if not url:
            if self._replica.is_down:
                return False
            await self._go_home()
            return True
        try:
            seat = await self._harbour.take(url, self._sit(version), self.move_on)
        except SeatRefusedError as error:
            logger.info("no refuge: %s", error)
            return False
        await self._replace(seat)
        return True

    async def _go_home(self) -> None:
        await self._replace(HomePlace(self._replica, await self._replica.berths.admit(waits=False), self._harbour.url))

    async def _replace(self, place: Place) -> None:
        left, self._place = self._place, place
        await left.leave()
        if self._has_ended:
            await place.leave()

    def _sit(self, version: WeightVersion | None) -> Sit:
        return Sit("" if version is None else str(version), self._context_tokens, self._sampled_tokens)


class Seats:
    """The seats of one worker's trajectories."""

    def __init__(self, replica: Replica, harbour: Harbour) -> None:
        self._replica, self._harbour = replica, harbour
        self._seats: set[Seat] = set()

    def num_away(self, groups: Iterable[str]) -> int:
        """How many of these groups take no room here: all their open trajectories are guests of others."""
        here = {seat.group_id for seat in self._seats if seat.url == self._harbour.url}
        away = {seat.group_id for seat in self._seats} - here
        return len(away.intersection(groups))

    @contextlib.asynccontextmanager
    async def open(self, group_id: str) -> AsyncIterator[Seat]:
        """A seat at home, for one trajectory of a group, until the block ends; where it is then does not matter.

        Raises:
            DeadlineError: the replica admits nothing for too long.
        """
        home = HomePlace(self._replica, await self._replica.berths.admit(), self._harbour.url)
        seat = Seat(self._replica, self._harbour, home, group_id)
        self._seats.add(seat)
        try:
            yield seat
        finally:
            self._seats.discard(seat)
            await seat.close()

    async def release(self, url: str) -> dict[str, int]:
        """Move every trajectory of ours that is at home to another replica; how many went (`moved`), how many `stayed`."""
        seats = [seat for seat in self._seats if seat.url == self._harbour.url]
        async with asyncio.TaskGroup() as group:
            moves = [group.create_task(seat.move(url)) for seat in seats]
        moved = sum(move.result() for move in moves)
        return {"moved": moved, "stayed": len(moves) - moved}
