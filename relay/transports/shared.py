"""Bodies by shared memory between relays that find themselves on one host; all else by the wrapped transport.

A body that lies in a mapped file (`relay.mapped`: a slot) need not be sent to somebody who can map the file as well. The
first time, the sender says which folder its files lie in; a receiver that can open that very folder says so; from then on
such bodies travel as a file's name, offset and length, and the receiver copies them from there to their place.

Invariants: what cannot be shared is sent as bytes; everything that was opened is let go of with the edge.
A reference is no copy: if the file is rewritten before the receiver has read it, other bytes arrive; if it has gone, none.
The hop protocol holds a version while it sends it, and counts a piece only by the checksum of its own copy.
Does not know what messages mean, or how a folder is known to be shared (`relay.transports.shared_folder`).
"""

import logging
from pathlib import Path

import msgspec

from relay.mapped import locate
from relay.transports.base import Connection, Handler, LinkLostError, Place, Received, Transport, nowhere, unpack
from relay.transports.landing import land
from relay.transports.shared_folder import FilePart, FolderOffer, SharedFolder, this_machine
from relay.transports.zmq_tcp import ZmqTransport

logger = logging.getLogger("laminar.relay")

_PLAIN, _OFFER, _ANSWER, _REFERENCE = b"\0", b"\1", b"\2", b"\3"
_YES, _NO = b"\1", b"\0"


def zmq_or_shared(host: str) -> "SharedTransport":
    """What `relay.transport = "auto"` is: TCP by ZeroMQ, and shared memory between relays of one host.

    Args:
        host: address of the network card that others reach this machine by.
    """
    return SharedTransport(ZmqTransport(host))


class SharedTransport:
    """Wraps a transport.

    Args:
        inner: carries the heads, and the bodies that cannot be shared.
        machine: who is on the same one may share; None: where this thread runs. Empty: nothing is shared.
    """

    def __init__(self, inner: Transport, machine: str | None = None) -> None:
        self._inner, self._machine = inner, this_machine() if machine is None else machine

    async def start(self) -> str:
        """As the wrapped transport."""
        return await self._inner.start()

    async def serve(self, handle: Handler) -> None:
        """Run `handle` for everybody who connects, until cancelled."""

        async def handle_edge(connection: Connection) -> None:
            edge = SharedConnection(connection, self._machine)
            try:
                await handle(edge)
            finally:
                await edge.close()

        await self._inner.serve(handle_edge)

    async def connect(self, address: str) -> "SharedConnection":
        """An edge to `address`, as the wrapped transport."""
        return SharedConnection(await self._inner.connect(address), self._machine)

    async def close(self) -> None:
        """As the wrapped transport."""
        await self._inner.close()


class _Reference(msgspec.Struct, frozen=True, array_like=True):
    """A message whose body lies in a file."""

    part: FilePart
    head: bytes


class SharedConnection:
    """One end of an edge.

    Args:
        inner: carries the heads.
        machine: this one.
    """

    def __init__(self, inner: Connection, machine: str) -> None:
        self._inner, self._machine = inner, machine
        self._offered: Path | None = None
        self._is_accepted = False
        """Whether the other end reads from the offered folder."""
        self._theirs: SharedFolder | None = None

    @property
    def carrier(self) -> str:
        """What brings bodies to this end."""
        return "shared memory" if self._theirs is not None else self._inner.carrier

    async def send(self, head: bytes, body: memoryview | None = None) -> None:
        """Hand over a message; its body, in a mapped file or not, must stay as it is until the other side has answered."""
        found = locate(body) if body is not None and self._machine else None
        if body is None or found is None:
            await self._inner.send(_PLAIN + head, body)
            return
        file, offset = found
        if self._offered is None:
            await self._offer(file.path.parent)
        if self._is_accepted and self._offered == file.path.parent:
            reference = _Reference(FilePart(file.path.name, file.inode, offset, len(body)), head)
            await self._inner.send(_REFERENCE + msgspec.msgpack.encode(reference))
        else:
            await self._inner.send(_PLAIN + head, body)

    async def receive(self, place: Place = nowhere) -> Received:
        """The next message; a body that cannot be read where it is said to lie counts as empty."""
        while True:
            received = await self._inner.receive(lambda framed, num_bytes: place(framed[1:], num_bytes))
            kind, rest = received.head[:1], received.head[1:]
            if kind == _PLAIN:
                return Received(rest, received.num_bytes, received.checksum)
            if kind == _REFERENCE:
                return await self._fetch(unpack(rest, _Reference), place)
            if kind == _OFFER:
                await self._answer(unpack(rest, FolderOffer))
            elif kind == _ANSWER:
                self._is_accepted = rest == _YES
            else:
                raise LinkLostError("the other end speaks another protocol")

    async def close(self) -> None:
        """Let go of the edge and of the other end's files; harmless when repeated."""
        self._let_go()
        await self._inner.close()

    async def _offer(self, folder: Path) -> None:
        self._offered = folder
        try:
            offer = FolderOffer.of(self._machine, folder)
        except OSError:
            return  # it is being removed: the run ends
        await self._inner.send(_OFFER + msgspec.msgpack.encode(offer))

    async def _answer(self, offer: FolderOffer) -> None:
        self._let_go()
        self._theirs = SharedFolder.open(offer, self._machine)
        logger.info("pieces of an upstream whose slots are in %s come by %s", offer.path, self.carrier)
        await self._inner.send(_ANSWER + (_NO if self._theirs is None else _YES))

    async def _fetch(self, reference: _Reference, place: Place) -> Received:
        """Copy a body from where it lies."""
        head, part = reference.head, reference.part
        source = self._theirs.read(part) if self._theirs is not None else None
        if source is None:
            self._let_go()
            logger.info("%s of an upstream cannot be read: pieces come by %s from now on", part.name, self.carrier)
            await self._inner.send(_ANSWER + _NO)
            return Received(head, 0)
        target = place(head, part.num_bytes)
        return Received(head, part.num_bytes, "" if target is None else land(source, target))

    def _let_go(self) -> None:
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None
