"""The relay of one machine, as a Ray actor's body: owns the store, shows that it lives, makes room.

Invariants: the store's owner lock is held from `start` to `stop` or death; a lost Redis costs heartbeats, never versions;
nobody needs this process to publish or to read on the same machine.
Does not know Ray, tensors, or (in this release) other machines.
"""

import asyncio
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.config.sizes import published_bytes, read_model_size
from laminar.experience.client import hide_password
from relay.locks import FileLock
from relay.orphans import remove_orphans, touch_owner
from relay.slots import check_space, required_bytes
from relay.store import OWNER, VersionStore, open_store

logger = logging.getLogger("laminar.relay")

REDIS_SECONDS = 2.0
"""Deadline of one Redis call."""

BEATS_PER_SWEEP = 10
"""Orphans of other runs are looked for once in so many heartbeats."""


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
    """

    node_id: str
    host: str
    pid: int
    store: str
    newest: str
    versions: tuple[str, ...]
    beat_at: float

    def to_json(self) -> str:
        """The heartbeat's text."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


def heartbeat_key(run_id: str, node_id: str) -> str:
    """Where in Redis a relay shows that it lives."""
    return f"laminar:{run_id}:directory:relay:{node_id}"


class Relay:
    """One machine's relay. `start`, then `run` until `stop`; `remove` at the orderly end of the run.

    Args:
        store: this machine's store, not yet created.
        redis_url: where heartbeats go.
        heartbeat_seconds: time between heartbeats.
        ttl_seconds: a relay that is silent for so long counts as dead.
    """

    def __init__(
        self,
        store: VersionStore,
        redis_url: str,
        *,
        heartbeat_seconds: float = 1.0,
        ttl_seconds: float = 5.0,
    ) -> None:
        self._store = store
        self._redis_url = redis_url
        self._heartbeat_seconds = heartbeat_seconds
        self._ttl_seconds = ttl_seconds
        self._owner: FileLock | None = None
        self._stopping = asyncio.Event()
        self._redis_lost = False

    async def start(self, file_bytes: int = 0) -> str:
        """Free what dead runs left, create the store and become its owner.

        Args:
            file_bytes: length of one version, if known, to refuse early what cannot fit.

        Returns:
            The store's folder.

        Raises:
            EnvironmentSetupError: if the root is no folder, or the slots do not fit.
            RelayError: if another living relay owns the store.
        """
        store = self._store
        check_space(store.root, 0)
        for folder in remove_orphans(store.root):
            logger.info("removed the weights that a dead run left in %s", folder)
        held_bytes = store.slot_bytes()
        needed = required_bytes(file_bytes, keep_versions=store.keep_versions, mapping_readers=store.mapping_readers)
        check_space(store.root, max(0, needed - held_bytes))
        if self._owner is None:
            self._owner = store.hold(OWNER)
        touch_owner(store.folder)
        return str(store.folder)

    async def run(self) -> None:
        """Beat and make room until `stop`.

        Consumes: nothing. Produces: heartbeats, free slots.
        Waits for: the next heartbeat. Unblocked by: `stop`.
        """
        client = redis.asyncio.from_url(
            self._redis_url,
            socket_timeout=REDIS_SECONDS,
            socket_connect_timeout=REDIS_SECONDS,
            retry=Retry(NoBackoff(), 0),  # the next heartbeat is the retry
        )
        try:
            beats = 0
            while not self._stopping.is_set():
                touch_owner(self._store.folder)
                self._store.prune()
                if beats % BEATS_PER_SWEEP == 0:
                    await asyncio.to_thread(remove_orphans, self._store.root)  # freeing gigabytes takes a while
                await self._beat(client)
                beats += 1
                await self._pause()
        finally:
            await client.aclose()

    async def status(self) -> RelayStatus:
        """What the store holds now."""
        versions = tuple(str(version) for version in self._store.versions())
        return RelayStatus(
            node_id=self._store.node_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            store=str(self._store.folder),
            newest=versions[-1] if versions else "",
            versions=versions,
            beat_at=time.time(),
        )

    async def stop(self) -> None:
        """End `run` and let the store go; its versions stay. Harmless when repeated."""
        self._stopping.set()
        if self._owner is not None:
            self._owner.release()
            self._owner = None

    async def remove(self) -> None:
        """Stop and delete the store: the orderly end, after trainer and engines."""
        await self.stop()
        self._store.remove()

    async def _beat(self, client: redis.asyncio.Redis) -> None:
        key = heartbeat_key(self._store.run_id, self._store.node_id)
        try:
            await client.set(key, (await self.status()).to_json(), px=int(self._ttl_seconds * 1000))
        except (redis.exceptions.RedisError, OSError) as error:
            if not self._redis_lost:
                url = hide_password(self._redis_url)
                logger.warning("no heartbeat: Redis at %s does not answer (%s); weights flow on", url, error)
            self._redis_lost = True
        else:
            self._redis_lost = False

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._heartbeat_seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


class RelayRole:
    """The relay as the supervisor starts it.

    Args:
        context: the process's surroundings.
        config: the run's settings.
    """

    def __init__(self, context: RoleContext, config: LaminarConfig) -> None:
        self._config = config
        self._relay = Relay(open_store(config, context.run_id, context.node_id), context.redis_url)

    async def start(self) -> None:
        """Own the store; refuse a machine that cannot hold the weights, as `Relay.start`."""
        size = read_model_size(Path(self._config.model.path))
        await self._relay.start(published_bytes(self._config, size) if size else 0)

    async def run(self) -> None:
        """Beat and make room until `stop`."""
        await self._relay.run()

    async def status(self) -> RelayStatus:
        """What the store holds now."""
        return await self._relay.status()

    async def stop(self) -> None:
        """End `run`; the versions stay for whoever still reads."""
        await self._relay.stop()
