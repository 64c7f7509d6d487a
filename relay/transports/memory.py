"""Edges inside one process: for tests, and for simulations of many machines.

Invariant: a sender waits once `QUEUE_MESSAGES` are under way on its edge.
"""

import asyncio
from collections import deque

from relay.transports.base import Handler, LinkLostError, Place, Received, nowhere

QUEUE_MESSAGES = 32


class MemoryNetwork:
    """Where transports of one process find each other."""

    def __init__(self) -> None:
        self._transports: dict[str, MemoryTransport] = {}

    def transport(self, name: str) -> "MemoryTransport":
        """A transport that will be reachable as `name`; it takes the place of a dead one."""
        self._transports[name] = MemoryTransport(self, name)
        return self._transports[name]

    def find(self, name: str) -> "MemoryTransport":
        """The living transport of that name.

        Raises:
            LinkLostError: if there is none.
        """
        found = self._transports.get(name)
        if found is None or found.is_closed:
            raise LinkLostError(f"nobody is reachable as {name!r}")
        return found


class MemoryTransport:
    """One simulated machine's edges; made by `MemoryNetwork.transport`."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network, self._name = network, name
        self._arrivals: asyncio.Queue[MemoryConnection] = asyncio.Queue()
        self._ends: list[MemoryConnection] = []
        self.is_closed = False

    async def start(self) -> str:
        """Be reachable under this transport's name."""
        return self._name

    async def serve(self, handle: Handler) -> None:
        """Run `handle` for everybody who connects, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._handle(handle, await self._arrivals.get()))

    async def _handle(self, handle: Handler, connection: "MemoryConnection") -> None:
        try:
            await handle(connection)
        finally:
            await connection.close()

    async def connect(self, address: str) -> "MemoryConnection":
        """An edge to another transport of the network.

        Raises:
            LinkLostError: if nobody of that name lives.
        """
        other = self._network.find(address)
        there, back = _Pipe(), _Pipe()
        mine, theirs = MemoryConnection(back, there), MemoryConnection(there, back)
        self._ends.append(mine)
        other._ends.append(theirs)
        other._arrivals.put_nowait(theirs)
        return mine

    async def close(self) -> None:
        """End all edges, as death would."""
        self.is_closed = True
        for end in self._ends:
            await end.close()
        self._ends.clear()


class _Pipe:
    """One direction of an edge."""

    def __init__(self) -> None:
        self.messages: deque[tuple[bytes, bytes]] = deque()
        self.is_closed = False
        self.changed = asyncio.Condition()


class MemoryConnection:
    """One end of an edge."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.carrier = "memory"

    async def send(self, head: bytes, body: memoryview | None = None) -> None:
        """Hand over a copy of the message once there is room.

        Raises:
            LinkLostError: the edge was closed.
        """
        pipe = self._outgoing
        async with pipe.changed:
            await pipe.changed.wait_for(lambda: pipe.is_closed or len(pipe.messages) < QUEUE_MESSAGES)
            if pipe.is_closed:
                raise LinkLostError("the other end of the edge is closed")
            pipe.messages.append((head, bytes(body) if body is not None else b""))
            pipe.changed.notify_all()

    async def receive(self, place: Place = nowhere) -> Received:
        """The next message; what was sent before a close still arrives.

        Raises:
            LinkLostError: the edge was closed.
        """
        pipe = self._incoming
        async with pipe.changed:
            await pipe.changed.wait_for(lambda: pipe.is_closed or bool(pipe.messages))
            if not pipe.messages:
                raise LinkLostError("the other end of the edge is closed")
            head, body = pipe.messages.popleft()
            pipe.changed.notify_all()
        if body and (target := place(head, len(body))) is not None:
            target[:] = body
        return Received(head, len(body))

    async def close(self) -> None:
        """Close both directions; harmless when repeated."""
        for pipe in (self._incoming, self._outgoing):
            async with pipe.changed:
                pipe.is_closed = True
                pipe.changed.notify_all()
