"""Which relays live, where they are and what they hold: heartbeats in Redis, nothing else.

Invariants: a relay that is silent for the time to live drops out by itself; places in the chain outlive a restart; with
Redis lost the last list is kept, and weights flow on by it.
Does not know transports or versions.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import redis.exceptions
from redis.asyncio import Redis

from laminar.errors import EnvironmentSetupError
from laminar.experience.client import connect, hide_password, keep_cancellation

logger = logging.getLogger("laminar.relay")

REDIS_SECONDS = 2.0
"""Deadline of one heartbeat; the next heartbeat is the retry."""


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """What a relay says of itself; also its heartbeat, as JSON.

    Attributes:
        node_id: the Ray node.
        host: name of the machine.
        pid: the relay's process.
        store: folder of the store.
        newest: text of the newest complete version; empty before the first.
        versions: all complete versions, oldest first.
        beat_at: Unix seconds.
        address: where its transport is reached; empty if it serves nobody.
        is_master: whether the trainer publishes into its store.
        is_blocked: whether it can receive nothing now.
        upstream: node id of the relay it takes from now; empty if none.
        carrier: what brings it the pieces from there, such as TCP or shared memory; empty if nothing does.
        receiving: text of the version that is arriving; empty if none is.
        seconds_per_byte: of the last version it received, T_byte of the chain's formula; 0 before the first.
        start_seconds: what a piece costs it besides its bytes, T_start; 0 before the first.
        joined: its place in the chain, as the directory keeps it; Unix seconds.
    """

    node_id: str
    host: str
    pid: int
    store: str
    newest: str
    versions: tuple[str, ...]
    beat_at: float
    address: str = ""
    is_master: bool = False
    is_blocked: bool = False
    upstream: str = ""
    carrier: str = ""
    receiving: str = ""
    seconds_per_byte: float = 0.0
    start_seconds: float = 0.0
    joined: float = 0.0

    def to_json(self) -> str:
        """The heartbeat's text."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> "RelayStatus":
        """Read a heartbeat."""
        values: dict[str, Any] = json.loads(text)
        return cls(**(values | {"versions": tuple(values["versions"])}))


def heartbeat_key(run_id: str, node_id: str) -> str:
    """Where in Redis a relay shows that it lives."""
    return f"laminar:{run_id}:directory:relay:{node_id}"


def places_key(run_id: str) -> str:
    """Where in Redis the places in the chain are: a sorted set of node ids, by the time of their first joining."""
    return f"laminar:{run_id}:directory:relays"


class Directory:
    """One relay's view of the others.

    Args:
        url: of Redis.
        run_id: the run.
        node_id: this relay's.
        ttl_seconds: a relay that is silent for so long counts as dead.
    """

    def __init__(self, url: str, run_id: str, node_id: str, *, ttl_seconds: float) -> None:
        self._url, self._run_id, self._node_id, self._ttl_seconds = url, run_id, node_id, ttl_seconds
        self._client: Redis | None = None
        self._is_lost = False
        self.joined = time.time()
        """This relay's place; a restarted one learns its old place with the first heartbeat."""
        self.others: Sequence[RelayStatus] = ()
        """All other relays that live."""

    async def beat(self, status: RelayStatus) -> None:
        """Show that this relay lives, and see who else does. A lost Redis is said once."""
        try:
            async with asyncio.timeout(REDIS_SECONDS):
                await self._exchange(status)
        except (redis.exceptions.RedisError, OSError, EnvironmentSetupError, TimeoutError) as error:
            if not self._is_lost:
                url = hide_password(self._url)
                logger.warning("no heartbeat: Redis at %s does not answer (%s); weights flow on", url, error)
            self._is_lost = True
        else:
            self._is_lost = False

    async def close(self) -> None:
        """Let the connection go."""
        if self._client is not None:
            await self._client.aclose()

    async def _exchange(self, status: RelayStatus) -> None:
        if self._client is None:
            self._client = await connect(self._url)
        places = places_key(self._run_id)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(heartbeat_key(self._run_id, self._node_id), status.to_json(), px=int(self._ttl_seconds * 1000))
        pipeline.zadd(places, {self._node_id: self.joined}, nx=True)
        pipeline.zrange(places, 0, -1, withscores=True)
        _, _, found = await keep_cancellation(pipeline.execute())
        joined = {node.decode(): float(place) for node, place in found}
        self.joined = joined[self._node_id]
        names = [node for node in joined if node != self._node_id]
        texts = await self._client.mget([heartbeat_key(self._run_id, node) for node in names]) if names else []
        others = [RelayStatus.from_json(text) for text in texts if text is not None]
        self.others = tuple(replace(other, joined=joined[other.node_id]) for other in others)
