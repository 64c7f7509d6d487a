"""One edge as the hop protocol uses it: typed messages, and a deadline with the other relay's name on every step.

Invariants: nothing waits without a deadline; an error names the relay at the other end; nobody is served, and no offer is
believed, before both ends have proved that they know the run's token (it never travels).
Does not know versions or stores.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from laminar.errors import DeadlineError, RelayError
from relay.messages import Challenge, Hello, Message, Proof, Refusal, Welcome, decode, encode
from relay.transports.base import Connection, Received

T = TypeVar("T")
M = TypeVar("M")

PlaceBody = Callable[[Message, int], memoryview | None]
"""From a message and its body's length to where the body shall lie; None: drop it."""

_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class HopLimits:
    """How patient a hop is, and how much it has under way.

    Attributes:
        silence_seconds: the other end, which says at least `Alive`, counts as dead after so long without a word.
        alive_seconds: time between two words of one who has nothing to say.
        stall_seconds: an upstream that lives but passes on nothing of an announced version is left after so long.
        avoid_seconds: how long an upstream that failed is not asked again if there is another.
        retry_seconds: pause before the next attempt when there is no other.
        credits: pieces under way on an edge.
        max_attempts: how often one piece may come broken before the upstream is left.
    """

    silence_seconds: float = 6.0
    alive_seconds: float = 0.5
    stall_seconds: float = 10.0
    avoid_seconds: float = 10.0
    retry_seconds: float = 0.2
    credits: int = 4
    max_attempts: int = 3


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a relay proves in every handshake: that it belongs to the run."""

    run_id: str
    node_id: str
    token: str

    def proof(self, side: str, *nonces: bytes) -> bytes:
        """HMAC-SHA256 by the run's token, over who proves it and both nonces."""
        text = b"|".join([b"laminar relay", self.run_id.encode(), side.encode(), *nonces])
        return hmac.digest(self.token.encode(), text, "sha256")


class Link:
    """Typed messages over a connection.

    Args:
        connection: the edge.
        peer: name of the other end, for errors; an upstream learns it in the handshake.
        limits: deadlines.
    """

    def __init__(self, connection: Connection, peer: str, limits: HopLimits) -> None:
        self._connection, self.peer, self._limits = connection, peer, limits

    async def send(self, message: Message, body: memoryview | None = None) -> None:
        """Hand over a message.

        Raises:
            LinkLostError: the other end is gone.
            DeadlineError: it takes nothing.
        """
        step = f"{self.peer} to take a {type(message).__name__}"
        await self._in_time(self._connection.send(encode(message), body), step)

    async def receive(self, what: str, place: PlaceBody | None = None) -> tuple[Message, Received]:
        """The next message, and what is known of its body.

        Args:
            what: what is waited for, for errors.
            place: where a body shall lie.

        Raises:
            LinkLostError: the other end is gone.
            DeadlineError: it is silent.
            RelayError: it says what is no message.
        """
        seen: list[Message] = []

        def place_body(head: bytes, num_bytes: int) -> memoryview | None:
            seen.append(decode(head))
            return place(seen[0], num_bytes) if place else None

        received = await self._in_time(self._connection.receive(place_body), f"{what} from {self.peer}")
        return (seen[0] if seen else decode(received.head)), received

    async def expect(self, kind: type[M], what: str) -> M:
        """The next message, which must be of this kind.

        Raises:
            RelayError: if it is another, or a refusal; else as `receive`.
        """
        message, _ = await self.receive(what)
        if isinstance(message, Refusal):
            raise RelayError(f"{self.peer} refuses: {message.reason}")
        if not isinstance(message, kind):
            raise RelayError(f"{self.peer} said {type(message).__name__} instead of {kind.__name__}")
        return message

    async def _in_time(self, step: Awaitable[T], name: str) -> T:
        try:
            async with asyncio.timeout(self._limits.silence_seconds):
                return await step
        except TimeoutError:
            raise DeadlineError(name, self._limits.silence_seconds) from None


async def greet(link: Link, mine: Credentials) -> None:
    """The downstream's half of the handshake.

    Raises:
        RelayError: if the upstream refuses, or does not know the run's token; else as `Link.receive`.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await link.send(Hello(mine.run_id, mine.node_id, nonce))
    challenge = await link.expect(Challenge, "the handshake")
    if not hmac.compare_digest(challenge.proof, mine.proof("upstream", nonce)):
        raise RelayError(f"{link.peer} does not know this run's token: it belongs to another run")
    await link.send(Proof(mine.proof("downstream", nonce, challenge.nonce)))
    await link.expect(Welcome, "the handshake")


async def admit(link: Link, mine: Credentials) -> None:
    """The upstream's half of the handshake; gives the link its peer's name.

    Raises:
        RelayError: if the downstream belongs to another run (it is told so); else as `Link.receive`.
    """
    hello = await link.expect(Hello, "the handshake")
    link.peer = f"relay {hello.node_id}"
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await link.send(Challenge(mine.proof("upstream", hello.nonce), nonce))
    proof = await link.expect(Proof, "the handshake")
    if hello.run_id != mine.run_id or not hmac.compare_digest(proof.proof, mine.proof("downstream", hello.nonce, nonce)):
        await link.send(Refusal("wrong run token"))
        raise RelayError(f"{link.peer} showed a wrong run token and was refused")
    await link.send(Welcome())
