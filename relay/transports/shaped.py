"""A transport with a bad network in front of it: what is sent may be changed, repeated, held back or slowed.

For tests of what a hop does about it, and for benchmarks with a rate limit. Everything else is the wrapped transport's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from relay.transports.base import Connection, Handler, Place, Received, Transport, nowhere

Message = tuple[bytes, bytes | memoryview | None]
Shape = Callable[[Message], Awaitable[Sequence[Message]]]
"""From a message that is to be sent to those that are sent instead, in order; may take its time."""


async def unchanged(message: Message) -> Sequence[Message]:
    """The shape of a good network."""
    return (message,)


class ShapedTransport:
    """Wraps a transport; both ends of its edges are shaped where they send.

    Args:
        inner: what carries the messages.
        shape: called for every message.
        bytes_per_second: limit of the whole transport's sending; None: as fast as `inner`.
    """

    def __init__(self, inner: Transport, shape: Shape = unchanged, *, bytes_per_second: float | None = None) -> None:
        self._inner, self._shape, self._rate = inner, shape, bytes_per_second
        self._free_at = 0.0

    async def start(self) -> str:
        """As the wrapped transport."""
        return await self._inner.start()

    async def serve(self, handle: Handler) -> None:
        """As the wrapped transport."""

        async def handle_shaped(connection: Connection) -> None:
            await handle(_Shaped(connection, self))

        await self._inner.serve(handle_shaped)

    async def connect(self, address: str) -> Connection:
        """As the wrapped transport."""
        return _Shaped(await self._inner.connect(address), self)

    async def close(self) -> None:
        """As the wrapped transport."""
        await self._inner.close()

    async def send(self, connection: Connection, message: Message) -> None:
        """Send what the shape makes of a message, at most at the given rate."""
        for head, body in await self._shape(message):
            view = None if body is None else memoryview(body)
            await self._pace(len(head) + (len(view) if view is not None else 0))
            await connection.send(head, view)

    async def _pace(self, num_bytes: int) -> None:
        """Wait until this message would have passed a line of the given rate."""
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + num_bytes / self._rate
        await asyncio.sleep(self._free_at - now)


class _Shaped:
    def __init__(self, inner: Connection, owner: ShapedTransport) -> None:
        self._inner, self._owner = inner, owner

    @property
    def carrier(self) -> str:
        return self._inner.carrier

    async def send(self, head: bytes, body: memoryview | None = None) -> None:
        await self._owner.send(self._inner, (head, body))

    async def receive(self, place: Place = nowhere) -> Received:
        return await self._inner.receive(place)

    async def close(self) -> None:
        await self._inner.close()
