"""The relay of one machine, as a Ray actor's body: owns the store, shows that it lives, makes room, receives and passes on.

Invariants: the store's owner lock is held from `start` to `stop` or death; a lost Redis costs heartbeats, never versions;
nobody needs this process to publish or to read on the same machine; a master receives from nobody, its trainer writes.
Does not know Ray or tensors.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from laminar.config.sizes import slot_bytes
from laminar.errors import EnvironmentSetupError
from laminar.policies.chain import Hop, best_chunk_bytes
from laminar.types import WeightVersion
from relay.directory import Directory, RelayStatus
from relay.follower import Follower, Neighbour
from relay.link import Credentials, HopLimits
from relay.locks import FileLock
from relay.orphans import remove_orphans, touch_owner
from relay.receiver import HopReport, Receiver
from relay.sender import Sender
from relay.shelf import Shelf
from relay.slots import check_space, required_bytes
from relay.store import OWNER, VersionStore
from relay.transports.base import Transport

logger = logging.getLogger("laminar.relay")

BEATS_PER_SWEEP = 10
"""Orphans of other runs are looked for once in so many heartbeats."""

WATCH_SECONDS = 0.02
"""How often a master looks for a version that its trainer has published, which can set no event of ours."""


@dataclass(frozen=True, slots=True)
class Chained:
    """What makes a relay a hop of a chain.

    Attributes:
        transport: its edges.
        credentials: of the run.
        is_master: whether a trainer publishes into its store.
        limits: deadlines and credits.
        report: called with every version that was received.
    """

    transport: Transport
    credentials: Credentials
    is_master: bool
    limits: HopLimits = field(default_factory=HopLimits)
    report: Callable[[HopReport], None] = lambda _: None


class Relay:
    """One machine's relay. `start`, then `run` until `stop`; `remove` at the orderly end of the run.

    Args:
        store: this machine's store, not yet created.
        redis_url: where heartbeats go.
        chained: how it takes part in a chain; None: it has no other machines.
        heartbeat_seconds: time between heartbeats.
        ttl_seconds: a relay that is silent for so long counts as dead.
    """

    def __init__(
        self,
        store: VersionStore,
        redis_url: str,
        chained: Chained | None = None,
        *,
        heartbeat_seconds: float = 1.0,
        ttl_seconds: float = 5.0,
    ) -> None:
        self._store, self._chained = store, chained
        self._heartbeat_seconds = heartbeat_seconds
        self._directory = Directory(redis_url, store.run_id, store.node_id, ttl_seconds=ttl_seconds)
        self._owner: FileLock | None = None
        self._stopping = asyncio.Event()
        self._resting = asyncio.Event()
        """Set while `run` is not running."""
        self._resting.set()
        self._completed = asyncio.Event()
        """Set when a version has become complete here: worth a heartbeat."""
        self._shelf = Shelf(store)
        self._address = ""
        self._receiver: Receiver | None = None
        self._follower: Follower | None = None
        self._last: HopReport | None = None

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
        held_bytes = sum(map(slot_bytes, store.slot_lengths()))
        needed = required_bytes(file_bytes, keep_versions=store.keep_versions, mapping_readers=store.mapping_readers)
        check_space(store.root, max(0, needed - held_bytes) if file_bytes else 0)
        if self._owner is None:
            self._owner = store.hold(OWNER)
        touch_owner(store.folder)
        return str(store.folder)

    async def run(self) -> None:
        """Beat, make room, receive and pass on until `stop`.

        Consumes: versions of the upstream. Produces: versions for this machine and the downstreams, heartbeats, free slots.
        Waits for: the upstream, the next heartbeat. Unblocked by: `stop`.

        Raises:
            EnvironmentSetupError: the address is not this machine's, or it has no memory for the slots.
        """
        self._resting.clear()
        try:
            await self._open_edges()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._beat_on())]
                if self._chained is not None:
                    sender = Sender(self._store, self._shelf, self._chained.credentials, self._chained.limits)
                    tasks.append(group.create_task(self._chained.transport.serve(sender.serve)))
                    tasks.append(group.create_task(self._follower.run() if self._follower else self._watch_store()))
                await self._stopping.wait()
                for task in tasks:
                    task.cancel()
        except* EnvironmentSetupError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._close_edges()
            self._resting.set()

    async def status(self) -> RelayStatus:
        """What the store holds now, and how it is reached."""
        versions = tuple(str(version) for version in self._store.versions())
        incoming = self._shelf.incoming
        return RelayStatus(
            node_id=self._store.node_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            store=str(self._store.folder),
            newest=versions[-1] if versions else "",
            versions=versions,
            beat_at=time.time(),
            address=self._address,
            is_master=self._chained is not None and self._chained.is_master,
            is_blocked=self._receiver is not None and self._receiver.is_blocked,
            upstream=self._follower.upstream if self._follower else "",
            carrier=self._follower.carrier if self._follower else "",
            receiving=str(incoming.version) if incoming else "",
            seconds_per_byte=self._last.seconds / self._last.bytes if self._last and self._last.bytes else 0.0,
            start_seconds=self._follower.start_seconds if self._follower else 0.0,
            joined=self._directory.joined,
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
        await self._resting.wait()  # `run` was told to end; what it still does is bounded by its own deadlines
        self._store.remove()

    async def _open_edges(self) -> None:
        """Be reachable; a relay that is no master becomes the writer of its store."""
        chained = self._chained
        if chained is None:
            return
        self._address = await chained.transport.start()
        if not chained.is_master:
            self._receiver = Receiver(self._store, self._shelf, chained.limits, self._note)
            self._follower = Follower(
                chained.transport, self._receiver, chained.credentials, self._neighbours, chained.limits
            )

    async def _close_edges(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        if self._chained is not None:
            await self._chained.transport.close()
        await self._directory.close()

    def _neighbours(self) -> tuple[float, list[Neighbour]]:
        """This relay's place, and all others that live."""
        others = [
            Neighbour(
                Hop(other.node_id, other.joined, is_master=other.is_master, is_blocked=other.is_blocked),
                other.address,
                WeightVersion.parse(other.newest) if other.newest else None,
            )
            for other in self._directory.others
        ]
        return self._directory.joined, others

    def _note(self, report: HopReport) -> None:
        self._last = report
        self._completed.set()
        if self._chained is not None:
            self._chained.report(report)

    async def _watch_store(self) -> None:
        """Tell downstreams of every version that the trainer publishes."""
        newest: WeightVersion | None = None
        while True:
            if (found := self._store.newest()) != newest:
                newest = found
                self._shelf.notify()
                self._completed.set()
            await asyncio.sleep(WATCH_SECONDS)

    async def _beat_on(self) -> None:
        """A heartbeat at least every `heartbeat_seconds`, and at once when a version is complete: the announcement."""
        beats = 0
        while True:
            touch_owner(self._store.folder)
            self._store.prune()
            if beats % BEATS_PER_SWEEP == 0:
                await asyncio.to_thread(remove_orphans, self._store.root)  # freeing gigabytes takes a while
            self._completed.clear()
            await self._directory.beat(await self.status())
            self._advise_chunk_bytes()
            beats += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._completed.wait()

    def _advise_chunk_bytes(self) -> None:
        """Tell the trainer's publisher which pieces the chain wants, by the slowest hop's measured constants."""
        others = [other for other in self._directory.others if other.seconds_per_byte and other.start_seconds]
        newest = self._store.newest()
        if self._chained is None or not self._chained.is_master or not others or newest is None:
            return
        advice = best_chunk_bytes(
            num_machines=1 + len(self._directory.others),
            file_bytes=max(self._store.slot_lengths(), default=0),
            seconds_per_byte=max(other.seconds_per_byte for other in others),
            start_seconds=max(other.start_seconds for other in others),
        )
        self._store.advise_chunk_bytes(advice)
