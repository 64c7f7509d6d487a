"""Keeps a machine on the newest version, whoever dies: chooses the upstream, and another one when it fails.

Invariants: there is always an attempt under way; an upstream that failed is avoided for a while if there is another, so a
dead hop is spliced out by its successor alone; the planned order is taken up again between two versions, never within one.
Does not know how hops are found (`relay.directory`) or how pieces travel (`relay.receiver`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar.errors import DeadlineError, RelayError
from laminar.policies.chain import Hop, upstream_of
from laminar.types import WeightVersion
from relay.link import Credentials, HopLimits, Link, greet
from relay.receiver import Receiver, SlotsLeasedError
from relay.transports.base import Connection, Transport

logger = logging.getLogger("laminar.relay")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A hop and how to reach it.

    Attributes:
        hop: its place in the chain.
        address: as its transport gave it.
        newest: its newest complete version; None before the first.
    """

    hop: Hop
    address: str
    newest: WeightVersion | None


class Follower:
    """Follows the chain.

    Args:
        transport: how upstreams are reached.
        receiver: takes what they pass on.
        credentials: of this relay.
        neighbours: gives this relay's place and all other hops that are known to live; asked often.
        limits: deadlines.
    """

    def __init__(
        self,
        transport: Transport,
        receiver: Receiver,
        credentials: Credentials,
        neighbours: Callable[[], tuple[float, Sequence[Neighbour]]],
        limits: HopLimits,
    ) -> None:
        self._transport, self._receiver, self._credentials = transport, receiver, credentials
        self._neighbours, self._limits = neighbours, limits
        self._avoided: dict[str, float] = {}
        self._is_waiting = False
        """For a free slot: said once."""
        self.upstream = ""
        """Node id of the relay that is followed now; empty while there is none."""
        self._connection: Connection | None = None
        """To it."""
        self.start_seconds = 0.0
        """A quarter of the last handshake (two round trips): what a piece costs besides its bytes."""

    @property
    def carrier(self) -> str:
        """What brings pieces from the upstream; empty while there is none."""
        return self._connection.carrier if self._connection is not None else ""

    async def run(self) -> None:
        """Keep this machine on the newest version.

        Consumes: the neighbours' list, pieces. Produces: complete versions.
        Waits for: an upstream, then a newer version. Unblocked by: the other relays, or cancellation.

        Raises:
            EnvironmentSetupError: the machine has no memory for the slots.
        """
        while True:
            upstream = self._choose()
            if upstream is None:
                self._avoided.clear()  # nobody else is left: try them again
                await asyncio.sleep(self._limits.retry_seconds)
                continue
            try:
                await self._pull_from(upstream)
            except SlotsLeasedError as error:
                if not self._is_waiting:
                    logger.warning("nothing can be received now: %s", error)
                self._is_waiting = True
                await asyncio.sleep(self._limits.retry_seconds)
            except (RelayError, DeadlineError) as error:
                logger.warning("relay %s is left as upstream: %s", upstream.hop.node_id, error)
                self._avoided[upstream.hop.node_id] = time.monotonic() + self._limits.avoid_seconds

    def _choose(self) -> Neighbour | None:
        now = time.monotonic()
        self._avoided = {node: until for node, until in self._avoided.items() if until > now}
        joined, neighbours = self._neighbours()
        known = {neighbour.hop.node_id: neighbour for neighbour in neighbours if neighbour.address}
        hops = [neighbour.hop for neighbour in known.values()]
        hop = upstream_of(self._credentials.node_id, joined, hops, self._avoided)
        return known[hop.node_id] if hop else None

    def _announced(self) -> WeightVersion | None:
        _, neighbours = self._neighbours()
        return max((n.newest for n in neighbours if n.newest is not None), default=None)

    async def _pull_from(self, upstream: Neighbour) -> None:
        connection = await self._transport.connect(upstream.address)
        try:
            link = Link(connection, f"relay {upstream.hop.node_id}", self._limits)
            started = time.monotonic()
            await greet(link, self._credentials)
            self.start_seconds = (time.monotonic() - started) / 4
            self.upstream, self._connection = upstream.hop.node_id, connection
            await self._receiver.pull(link, lambda: self._is_other(upstream), self._announced)
            self._is_waiting = False
        finally:
            self.upstream, self._connection = "", None
            await connection.close()

    def _is_other(self, upstream: Neighbour) -> bool:
        """Whether the chain as it is now gives this hop another upstream."""
        self._is_waiting = False
        chosen = self._choose()
        return chosen is not None and (chosen.hop.node_id, chosen.address) != (upstream.hop.node_id, upstream.address)
