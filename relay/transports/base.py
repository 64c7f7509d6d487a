"""What a transport is: edges between relays that carry whole messages, in order, with pressure back to the sender.

A message is a small head and, sometimes, a large body. The receiver says where a body shall lie once it knows the head, so a
piece of weights goes straight into its slot. A transport knows no more: tokens, versions, deadlines and which checksum is
right are the hop protocol's (`relay.link`).

Invariants that every transport keeps (`tests/contract/relay/test_relay_transports.py`): messages come whole, once and in
order, or the link is lost; a lost link says so on both ends, by `LinkLostError`, at the latest when the other side's process
is found dead; what is under way on one edge is bounded by the protocol's credits, and one edge's failure touches no other.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from laminar.errors import RelayError


class LinkLostError(RelayError):
    """The other end is gone, or cannot be reached."""


T = TypeVar("T")

Place = Callable[[bytes, int], memoryview | None]
"""From a message's head and its body's length in bytes to where the body shall lie, of that length; None: drop the body."""


def nowhere(head: bytes, num_bytes: int) -> memoryview | None:
    """For messages whose body nobody wants."""
    return None


@dataclass(frozen=True, slots=True)
class Received:
    """A message that arrived.

    Attributes:
        head: of it.
        num_bytes: how long its body was, placed or dropped.
        checksum: xxh3_64 of the body as it lies in its place, if the transport has just copied it there; else empty.
    """

    head: bytes
    num_bytes: int
    checksum: str = ""


def unpack(frame: bytes, kind: type[T]) -> T:
    """Read what a transport's other end said, who may be anybody: nothing is known of it before the handshake.

    Raises:
        LinkLostError: it is no such thing.
    """
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LinkLostError(f"the other end speaks another protocol ({error})") from error


class Connection(Protocol):
    """One end of an edge. One task sends and one receives at a time."""

    @property
    def carrier(self) -> str:
        """What brings bodies to this end, for people to read; it may change."""

    async def send(self, head: bytes, body: memoryview | None = None) -> None:
        """Hand over a message. The body must stay as it is until the other side has answered it.

        Raises:
            LinkLostError: the other end is gone.
        """

    async def receive(self, place: Place = nowhere) -> Received:
        """The next message.

        Raises:
            LinkLostError: the other end is gone.
        """

    async def close(self) -> None:
        """Let go of the edge; harmless when repeated."""


Handler = Callable[[Connection], Awaitable[None]]
"""Serves one downstream until it leaves; raises nothing but cancellation."""


class Transport(Protocol):
    """Edges of one kind, out of one process."""

    async def start(self) -> str:
        """Be reachable; returns the address that others connect to."""

    async def serve(self, handle: Handler) -> None:
        """Run `handle` for everybody who connects, until cancelled."""

    async def connect(self, address: str) -> Connection:
        """An edge to whoever serves at `address`. May succeed before the other side has answered.

        Raises:
            LinkLostError: nobody can be there.
        """

    async def close(self) -> None:
        """End all edges; harmless when repeated."""


TRANSPORTS: Mapping[str, str] = {
    "auto": "relay.transports.shared:zmq_or_shared",
    "zmq": "relay.transports.zmq_tcp:ZmqTransport",
    "mooncake": "relay.transports.mooncake:MooncakeTransport",
    "collective": "relay.transports.collective:CollectiveTransport",
}
"""`relay.transport` by name: what is called with the address by which others reach this machine."""
