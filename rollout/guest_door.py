"""A replica's door: other workers' trajectories come in as guests, and the manager's commands.

One socket a guest. Invariants: a guest is open on our engine from its welcome until its socket ends, whoever ends it; one
that leaves in the middle of a request aborts it; only holders of the run's token are heard.
This module knows neither episodes nor plans.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import WSMsgType, web

from laminar.errors import DeadlineError, EngineError
from laminar.types import Segment, WeightVersion
from rollout.berths import SeatRefusedError
from rollout.guest_wire import (
    Abort,
    Answer,
    Ask,
    Failed,
    FromHost,
    MoveOn,
    Part,
    Refusal,
    SegmentWire,
    Sit,
    Welcome,
    decode_from_home,
    encode,
)
from rollout.occupants import GuestLimits, Occupant
from rollout.replica import Replica

logger = logging.getLogger("laminar.rollout.guests")

HEARTBEAT_SECONDS = 10.0
"""A home that does not answer a ping for so long is gone."""
FIRST_WORD_SECONDS = 10.0
CLOSE_SECONDS = 0.01
"""What a guest gets at the end; 0 would mean for ever."""

Release = Callable[[str], Awaitable[dict[str, int]]]
"""Move everything that is open here to the replica whose door has this URL; how many went and how many stayed."""


@dataclass(slots=True, eq=False)
class _Guest:
    """One guest's socket, the place that it takes, and what is to be sent; None ends the stay."""

    socket: web.WebSocketResponse
    occupant: Occupant
    outgoing: "asyncio.Queue[FromHost | None]" = field(default_factory=asyncio.Queue)
    asking: "asyncio.Task[None] | None" = None


class GuestDoor:
    """One replica's door.

    Args:
        replica: whose.
        limits: what is to hold with guests.
        token: the run's.
        release: carries out the manager's command.
    """

    def __init__(self, replica: Replica, limits: GuestLimits, *, token: str, release: Release) -> None:
        self._replica, self._limits, self._token, self._release = replica, limits, token, release
        self._guests: set[_Guest] = set()

    @contextlib.asynccontextmanager
    async def open(self, address: str) -> AsyncIterator[str]:
        """Listen until the block ends; yields the URL."""
        application = web.Application(middlewares=[self._guard])
        application.router.add_get("/guest", self._receive)
        application.router.add_post("/release", self._command_release)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)
        await runner.setup()
        try:
            site = web.TCPSite(runner, address, 0, backlog=1024)
            await site.start()
            port = runner.addresses[0][1]
            yield f"http://{address}:{port}"
        finally:
            await runner.cleanup()

    def send_on(self, url: str) -> int:
        """Ask every guest's home to move it to the replica whose door is there; how many were asked."""
        for guest in self._guests:
            guest.outgoing.put_nowait(MoveOn(url))
        return len(self._guests)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        presented = request.headers.get("Authorization", "")
        if not hmac.compare_digest(presented.encode(), f"Bearer {self._token}".encode()):
            return web.Response(status=401, text="the bearer token is missing or not this run's")
        return await handler(request)

    async def _command_release(self, request: web.Request) -> web.StreamResponse:
        command = await request.json()
        if str(self._replica.version) != command["version"] or not self._replica.berths.is_closed:
            return web.json_response({"moved": 0, "stayed": 0, "guests": 0})  # it has swapped meanwhile: nothing to release
        return web.json_response(await self._release(str(command["destination"])))

    async def _receive(self, request: web.Request) -> web.StreamResponse:
        """One guest, from its first word to its last."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=0, compress=False)
        await socket.prepare(request)
        async with asyncio.timeout(FIRST_WORD_SECONDS):
            sit = decode_from_home(await socket.receive_bytes())
        if not isinstance(sit, Sit):
            await socket.close(message=b"ask for a seat first")
            return socket
        wanted = WeightVersion.parse(sit.version) if sit.version else None
        try:
            occupant, held = await self._replica.berths.admit_guest(wanted, sit.context_tokens, self._limits)
        except SeatRefusedError as error:
            await socket.send_bytes(encode(Refusal(str(error))))
            await socket.close()
            return socket
        occupant.sampled_tokens = sit.sampled_tokens
        try:
            await socket.send_bytes(encode(Welcome(str(held))))
            await self._host(_Guest(socket, occupant))
        finally:
            await self._replica.berths.leave(occupant)
        return socket

    async def _host(self, guest: _Guest) -> None:
        """Serve a guest until its socket ends; a bug in serving it ends the socket at once, so that home goes elsewhere."""
        self._guests.add(guest)
        try:
            async with asyncio.TaskGroup() as stay:
                sending = stay.create_task(self._send(guest))
                async for message in guest.socket:
                    if message.type is not WSMsgType.BINARY:
                        break
                    await self._hear(guest, stay, message.data)
                for task in (guest.asking, sending):
                    if task is not None:
                        task.cancel()
        except* msgspec.DecodeError as error:
            logger.warning("a guest's message cannot be read: %s", error)
        finally:
            self._guests.discard(guest)
            await guest.socket.close()

    async def _hear(self, guest: _Guest, stay: asyncio.TaskGroup, data: bytes) -> None:
        match decode_from_home(data):
            case Ask() as ask:
                guest.asking = stay.create_task(self._answer(guest, ask))
            case Abort(request_id=request_id):
                with contextlib.suppress(EngineError, DeadlineError):  # the engine's end shows in the answer
                    await self._replica.abort(request_id)
            case Sit():
                logger.warning("a guest asked for a second seat on its socket")

    async def _answer(self, guest: _Guest, ask: Ask) -> None:
        input_ids = ask.input_ids()
        guest.occupant.begin(len(input_ids), ask.max_new_tokens)
        streamed = 0

        def hear(segment: Segment) -> None:
            nonlocal streamed
            streamed += len(segment)
            guest.occupant.grow(len(segment))
            guest.outgoing.put_nowait(Part(ask.request_id, SegmentWire.of(segment)))

        try:
            generation = await self._replica.generate(
                input_ids, ask.sampling(), ask.request_id, hear if ask.streams else None
            )
        except (EngineError, DeadlineError) as error:
            guest.outgoing.put_nowait(Failed(ask.request_id, str(error)))
        else:
            guest.occupant.grow(generation.num_tokens - streamed)
            guest.outgoing.put_nowait(Answer.of(ask.request_id, generation))
        if self._replica.is_down:
            guest.outgoing.put_nowait(None)  # it need not wait here for another engine

    async def _send(self, guest: _Guest) -> None:
        with contextlib.suppress(ConnectionError):
            while (message := await guest.outgoing.get()) is not None:
                await guest.socket.send_bytes(encode(message))
            await guest.socket.close()
