"""Edges over TCP by ZeroMQ: a ROUTER socket that serves, a DEALER socket for every upstream.

Bodies are sent without a copy, from the mapped slot; they arrive in ZeroMQ's own memory and are copied once, into the slot.
At most `credits x chunk` bytes of an edge lie in that memory, so no high-water mark is ever reached.

Invariants: nothing is pickled; an edge never reconnects by itself, so a lost one is noticed; the serving side learns of a
silent death by the hop protocol's deadlines; nothing is asked of a closed socket (the library keeps the address of its
memory, where another socket may lie by then, and would take that one's messages).
Does not know what messages mean.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from laminar.errors import EnvironmentSetupError
from relay.transports.base import Handler, LinkLostError, Place, Received, nowhere
from relay.transports.landing import land

IO_THREADS = 2
"""A relay in the middle receives and sends at once."""

SOCKET_BUFFER_BYTES = 4 * 1024**2
CARRIER = "TCP"
INBOX_MESSAGES = 1024
"""A peer that sends more without waiting for answers breaks the protocol and is dropped."""

_LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_MONITOR_STOPPED


class ZmqTransport:
    """TCP edges of one process.

    Args:
        host: address of the network card that others reach this machine by.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._context = zmq.asyncio.Context(io_threads=IO_THREADS)
        self._router: zmq.asyncio.Socket | None = None
        self._num_dialled = 0
        self._inboxes: dict[bytes, _Inbox | None] = {}
        """Every downstream that ever was; None for those that are served no more."""

    async def start(self) -> str:
        """Bind a port of the system's choice.

        Raises:
            EnvironmentSetupError: if the address is not this machine's.
        """
        router = self._context.socket(zmq.ROUTER)
        _set_options(router, {zmq.ROUTER_MANDATORY: 1})
        try:
            port = router.bind_to_random_port(f"tcp://{self._host}")
        except zmq.ZMQError as error:
            router.close()
            raise EnvironmentSetupError(f"the relay cannot listen on {self._host!r}: {error}") from error
        self._router = router
        return f"{self._host}:{port}"

    async def serve(self, handle: Handler) -> None:
        """Run `handle` for everybody who connects, until cancelled or closed."""
        assert self._router is not None, "start first"
        async with asyncio.TaskGroup() as group:
            handlers: list[asyncio.Task[None]] = []
            while not self._router.closed:
                sender, *frames = await self._router.recv_multipart(copy=False)
                identity = sender.bytes
                if identity not in self._inboxes:
                    inbox = self._inboxes[identity] = _Inbox()
                    served = _Served(self._router, identity, inbox)
                    handlers.append(group.create_task(self._handle(handle, identity, served)))
                if (known := self._inboxes[identity]) is not None:
                    known.put(frames)
            for handler in handlers:  # nothing comes to them any more
                handler.cancel()

    async def _handle(self, handle: Handler, identity: bytes, connection: "_Served") -> None:
        try:
            await handle(connection)
        finally:
            self._inboxes[identity] = None
            await connection.close()

    async def connect(self, address: str) -> "_Dialled":
        """An edge to `address`; whether somebody is there shows with the first answer, or as a lost link."""
        socket = self._context.socket(zmq.DEALER)
        self._num_dialled += 1
        try:
            _set_options(socket, {zmq.RECONNECT_IVL: -1, zmq.IMMEDIATE: 1})
            # A name of its own: the library's is made of a file number, which may be in use again by now.
            monitor = socket.get_monitor_socket(_LOST_EVENTS, f"inproc://lost-{self._num_dialled}")
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise LinkLostError(f"{address!r} cannot be reached: {error}") from error
        return _Dialled(socket, monitor)

    async def close(self) -> None:
        """End all edges; messages that were not sent are dropped."""
        self._context.destroy(linger=0)


def _set_options(socket: "zmq.asyncio.Socket", more: Mapping[int, int]) -> None:
    options = {
        zmq.LINGER: 0,
        zmq.SNDHWM: 0,  # credits bound what is under way
        zmq.RCVHWM: 0,
        zmq.SNDBUF: SOCKET_BUFFER_BYTES,
        zmq.RCVBUF: SOCKET_BUFFER_BYTES,
        **more,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


class _Inbox:
    """Messages of one downstream that were not received yet."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[list[zmq.Frame] | None] = asyncio.Queue(INBOX_MESSAGES)
        self._overrun = False

    def put(self, frames: "list[zmq.Frame]") -> None:
        if self._frames.full():
            self._overrun = True
        else:
            self._frames.put_nowait(frames)

    async def get(self) -> "list[zmq.Frame]":
        frames = await self._frames.get()
        if self._overrun or not frames:
            raise LinkLostError("the other end sends more than the protocol allows")
        return frames


class _Served:
    """The serving end of an edge."""

    def __init__(self, router: "zmq.asyncio.Socket", identity: bytes, inbox: _Inbox) -> None:
        self._router, self._identity, self._inbox = router, identity, inbox
        self.carrier = CARRIER
        self._is_closed = False

    async def send(self, head: bytes, body: memoryview | None = None) -> None:
        if self._is_closed or self._router.closed:
            raise LinkLostError("the edge is closed")
        try:
            await self._router.send_multipart([self._identity, head, *([] if body is None else [body])], copy=False)
        except zmq.ZMQError as error:
            raise LinkLostError(f"the other end is gone ({error})") from error

    async def receive(self, place: Place = nowhere) -> Received:
        if self._is_closed:
            raise LinkLostError("the edge is closed")
        return _unpack(await self._inbox.get(), place)

    async def close(self) -> None:
        """Say goodbye; what the other end still sends is ignored."""
        if self._is_closed or self._router.closed:
            return
        self._is_closed = True
        try:
            await self._router.send_multipart([self._identity, _GOODBYE])
        except zmq.ZMQError:
            return  # gone already, which is what is wanted


_GOODBYE = b""
"""A message without a head: the serving end has left."""


class _Dialled:
    """The end of an edge that asked for it."""

    def __init__(self, socket: "zmq.asyncio.Socket", monitor: Any) -> None:
        self._socket, self._monitor = socket, monitor
        self.carrier = CARRIER
        self._lost = asyncio.ensure_future(recv_monitor_message(monitor))
        self._is_closed = False

    async def send(self, head: bytes, body: memoryview | None = None) -> None:
        frames = [head, *([] if body is None else [body])]
        await self._unless_lost(lambda: self._socket.send_multipart(frames, copy=False))

    async def receive(self, place: Place = nowhere) -> Received:
        frames = await self._unless_lost(lambda: self._socket.recv_multipart(copy=False))
        if frames[0].bytes == _GOODBYE:
            raise LinkLostError("the other end has left")
        return _unpack(frames, place)

    async def close(self) -> None:
        if not self._is_closed and not self._socket.closed:
            self._is_closed = True
            self._lost.cancel()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    async def _unless_lost(self, request: Callable[[], Any]) -> Any:
        """The socket's answer, or the news that the connection broke, whichever comes first."""
        if self._is_closed or self._socket.closed:
            raise LinkLostError("the edge is closed")
        try:
            waiting: asyncio.Future[Any] = request()
            if not waiting.done():  # mostly it is: waiting for two things costs as much as a message
                await self._answered_or_lost(waiting)
            return waiting.result()
        except zmq.ZMQError as error:
            raise LinkLostError(f"the connection broke ({error})") from error

    async def _answered_or_lost(self, waiting: "asyncio.Future[Any]") -> None:
        try:
            await asyncio.wait((waiting, self._lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not waiting.done():
                waiting.cancel()
        if waiting.cancelled() or not waiting.done():
            raise LinkLostError("the connection broke, or was never made")


def _unpack(frames: "list[zmq.Frame]", place: Place) -> Received:
    head = frames[0].bytes
    if len(frames) == 1:
        return Received(head, 0)
    body = frames[1].buffer
    target = place(head, len(body))
    return Received(head, len(body), "" if target is None else land(body, target))
