"""The directory of replicas: who is alive, where it is reached, what it holds and how full it is.

Invariant: an entry is the word of the replica's own worker, at most `ttl_seconds` old; who is silent for longer is not here.
Reading it is advice: what matters (version, room) is checked again by the replica when it is asked. A lost server costs
heartbeats, nothing else. It knows neither engines nor plans.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import msgspec
import redis.exceptions
from redis.asyncio import Redis

from laminar.experience.client import keep_cancellation
from laminar.policies.repack import ReplicaLoad
from laminar.types import WeightVersion

TTL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """One replica, as it sees itself.

    Attributes:
        replica: the worker's name.
        url: where its door for guests and commands is.
        version: text of the version that its engine holds; empty while that is unknown.
        newest: text of the newest version on its machine; empty before the first.
        is_draining: it admits nothing, because a newer version waits.
        context_tokens, capacity_tokens, num_open, num_waiting, num_admitted, remaining_tokens: see `ReplicaLoad`.
    """

    replica: str
    url: str
    version: str
    newest: str
    is_draining: bool
    context_tokens: int
    capacity_tokens: int
    num_open: int
    num_waiting: int
    num_admitted: int
    remaining_tokens: int

    def load(self) -> ReplicaLoad | None:
        """What a plan needs of it; None while its weights are unknown."""
        if not self.version:
            return None
        return ReplicaLoad(
            self.replica,
            WeightVersion.parse(self.version),
            self.context_tokens,
            self.capacity_tokens,
            self.num_open,
            self.num_waiting,
            self.num_admitted,
            self.remaining_tokens,
        )


class ReplicaDirectory:
    """A run's replicas on a server.

    Args:
        client: belongs to the caller.
        run_id: name of the run.
        ttl_seconds: who is silent for so long is gone.
    """

    def __init__(self, client: Redis, run_id: str, *, ttl_seconds: float = TTL_SECONDS) -> None:
        self._client, self._ttl_seconds = client, ttl_seconds
        self._prefix = f"laminar:{run_id}:directory:"

    async def beat(self, entry: ReplicaEntry) -> None:
        """Show that a replica lives; a server that does not answer costs the beat."""
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.sadd(f"{self._prefix}replicas", entry.replica)
                pipeline.set(self._key(entry.replica), msgspec.msgpack.encode(entry), px=round(self._ttl_seconds * 1000))
                await keep_cancellation(pipeline.execute())

    async def forget(self, replica: str) -> None:
        """Take a replica out at once, for an orderly end."""
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            await self._client.delete(self._key(replica))

    async def entries(self) -> list[ReplicaEntry]:
        """All living replicas, by name; empty while the server does not answer."""
        try:
            names: Any = await self._client.smembers(f"{self._prefix}replicas")
            values: Any = await self._client.mget([self._key(name.decode()) for name in sorted(names)]) if names else []
        except (redis.exceptions.RedisError, OSError):
            return []
        return [msgspec.msgpack.decode(value, type=ReplicaEntry) for value in values if value is not None]

    def _key(self, replica: str) -> str:
        return f"{self._prefix}replica:{replica}"
