"""The downstream's half of a hop: takes versions from one upstream, and resumes an unfinished one at the next upstream.

Invariants: a version becomes visible only when every piece has its checksum; a hop that changes its upstream asks for
exactly the pieces it lacks; a version that was begun is finished as long as somebody before this hop has it, then the newest
goes next; an abandoned one gives its slot back.
Does not know which upstream to take (`relay.follower`), or who takes from this hop.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from laminar.errors import DeadlineError, RelayError
from laminar.types import WeightVersion
from relay.incoming import Incoming
from relay.link import HopLimits, Link
from relay.locks import FileLock
from relay.manifest import Manifest
from relay.messages import Alive, Chunk, FetchFiles, Files, Gone, Message, More, Offer, Pull, Want, to_ranges
from relay.model_files import describe_files, unpack_files
from relay.shelf import Shelf
from relay.slots import Slot
from relay.store import PUBLISHER, RANK, VersionStore
from relay.transports.base import LinkLostError, Received


class SlotsLeasedError(RelayError):
    """Every slot of this machine is kept or leased: nothing can be received now."""


@dataclass(frozen=True, slots=True)
class HopReport:
    """One version that a hop received.

    Attributes:
        version: as text.
        seconds: from the first request for a piece to its appearance, over all upstreams.
        bytes: bytes that came over the network, broken pieces included.
        broken: pieces that came broken.
    """

    version: str
    seconds: float
    bytes: int
    broken: int


class Receiver:
    """Takes versions into a store, of which it is the only writer.

    Args:
        store: this machine's store.
        shelf: told of every piece.
        limits: deadlines and credits.
        report: called with every version that was received.

    Raises:
        RelayError: if somebody else writes into the store.
    """

    def __init__(
        self, store: VersionStore, shelf: Shelf, limits: HopLimits, report: Callable[[HopReport], None] = lambda _: None
    ) -> None:
        self._store, self._shelf, self._limits, self._report = store, shelf, limits, report
        store.hold(RANK).release()  # where a trainer was, none of its ranks still writes
        self._lock: FileLock = store.hold(PUBLISHER)
        store.clean_partial()
        self._slots: list[Slot] = []
        self._file_bytes = 0
        self.is_blocked = False
        """Whether the last version that was offered found no free slot."""
        self._started = 0.0
        self._num_bytes = 0
        self._broken: Counter[int] = Counter()
        self._owed = 0
        """Credits that the upstream has not got back yet."""

    async def pull(
        self, link: Link, should_leave: Callable[[], bool], announced: Callable[[], WeightVersion | None]
    ) -> None:
        """Take one version after another from an upstream, after the handshake.

        Args:
            link: to the upstream.
            should_leave: asked whenever no version is on its way.
            announced: the newest version that is known to exist.

        Raises:
            RelayError: the upstream is lost, or sends broken pieces; SlotsLeasedError if there is no room.
            DeadlineError: it is silent, or passes nothing on.
            EnvironmentSetupError: the machine has no memory for the slots.
        """
        while True:
            offer = await self._ask(link, should_leave, announced)
            if offer is None:
                return
            manifest = self._checked(link, offer)
            if describe_files(self._store.model_files) != offer.files:
                await self._fetch_files(link, offer)  # before the slots, so that these are refused if not both fit
            if manifest.file_bytes != self._file_bytes:
                await self._prepare(manifest.file_bytes)
                return  # it took a while, and the upstream does not wait: ask anew
            incoming = self._begin(manifest)
            self._owed = 0
            await link.send(Pull(offer.version, to_ranges(incoming.missing), self._limits.credits))
            if await self._receive_pieces(link, incoming):
                self._finish(incoming)

    def close(self) -> None:
        """Stop receiving; what is unfinished is given up, complete versions stay."""
        self._abandon()
        for slot in self._slots:
            slot.close()
        self._slots, self._file_bytes = [], 0
        self._lock.release()

    async def _ask(
        self, link: Link, should_leave: Callable[[], bool], announced: Callable[[], WeightVersion | None]
    ) -> Offer | None:
        """The next offer; None if it is time to leave.

        Raises:
            DeadlineError: a newer version exists, but this upstream has not offered it in time.
        """
        mine = self._store.newest()
        incoming = self._shelf.incoming
        await link.send(Want(str(mine or ""), str(incoming.version) if incoming else ""))
        behind_since: float | None = None
        while True:
            message, _ = await link.receive("an offer")
            if isinstance(message, Offer):
                return message
            if isinstance(message, Gone | Chunk):
                continue  # of an earlier request
            if not isinstance(message, Alive):
                raise RelayError(f"{link.peer} said {type(message).__name__} instead of an offer")
            if should_leave():
                return None
            await link.send(Alive())
            newest = announced()
            is_behind = newest is not None and (mine is None or newest > mine)
            behind_since = (behind_since or time.monotonic()) if is_behind else None
            self._check_stall(behind_since, f"{link.peer} to offer {newest}")

    def _check_stall(self, since: float | None, what: str) -> None:
        if since is not None and time.monotonic() - since > self._limits.stall_seconds:
            raise DeadlineError(what, self._limits.stall_seconds)

    def _checked(self, link: Link, offer: Offer) -> Manifest:
        manifest = Manifest.from_json(offer.manifest)
        newest = self._store.newest()
        if manifest.run_id != self._store.run_id or (newest is not None and manifest.version <= newest):
            raise RelayError(
                f"{link.peer} offered {manifest.version} of run {manifest.run_id}, but {newest} is here already"
            )
        return manifest

    async def _prepare(self, file_bytes: int) -> None:
        """Allocate and touch the slots, which takes seconds a gigabyte."""
        self._abandon()
        for slot in self._slots:
            slot.close()
        self._slots = []
        self._slots = await asyncio.to_thread(self._store.prepare_slots, file_bytes)
        self._file_bytes = file_bytes

    async def _fetch_files(self, link: Link, offer: Offer) -> None:
        body = bytearray()

        def place(message: Message, num_bytes: int) -> memoryview | None:
            if not isinstance(message, Files):
                return None
            body.extend(bytes(num_bytes))
            return memoryview(body)

        await link.send(FetchFiles())
        while True:
            message, _ = await link.receive("the model's files", place)
            if isinstance(message, Files):
                unpack_files(self._store.model_files, message.sizes, bytes(body), offer.files)
                return
            if not isinstance(message, Alive | Chunk):
                raise RelayError(f"{link.peer} said {type(message).__name__} instead of the model's files")

    def _begin(self, manifest: Manifest) -> Incoming:
        """The version to receive: the one that was begun, if it is the same, else a new one in a free slot."""
        incoming = self._shelf.incoming
        if incoming is not None and incoming.manifest == manifest:
            return incoming
        self._abandon()
        slot = self._store.claim_slot(self._slots)
        self.is_blocked = slot is None
        if slot is None:
            raise SlotsLeasedError(f"all {len(self._slots)} weight slots are kept or leased: {manifest.version} must wait")
        incoming = Incoming(self._store, slot, manifest)
        self._started, self._num_bytes, self._broken = time.monotonic(), 0, Counter()
        self._shelf.arrive(incoming)
        return incoming

    async def _receive_pieces(self, link: Link, incoming: Incoming) -> bool:
        """Take pieces until none is missing; False if the upstream has the version no more."""
        version = str(incoming.version)

        def place(message: Message, num_bytes: int) -> memoryview | None:
            if isinstance(message, Chunk) and message.version == version:
                return incoming.place(message.index, num_bytes)
            return None

        progress = time.monotonic()
        while not incoming.is_whole:
            message, received = await link.receive(f"a piece of {version}", place)
            match message:
                case Chunk(of, index) if of == version:
                    progress = time.monotonic()
                    await self._take(link, incoming, index, received)
                case Gone(of) if of == version:
                    return False
                case Alive():
                    await self._answer(link, Alive())
                    self._check_stall(progress, f"{link.peer} to pass on the next piece of {version}")
                case Chunk() | Gone():
                    continue  # of an earlier request
                case _:
                    raise RelayError(f"{link.peer} said {type(message).__name__} instead of a piece of {version}")
        return True

    async def _take(self, link: Link, incoming: Incoming, index: int, received: Received) -> None:
        """Verify one piece; a broken one is asked for again, a repeated one is passed over."""
        if index < 0 or index >= len(incoming.manifest.checksums) or incoming.has(index):
            return
        self._num_bytes += received.num_bytes
        version = str(incoming.version)
        self._owed += 1
        if incoming.accept(index, received):
            self._shelf.notify()
            await asyncio.sleep(0)  # the next hop is told of this piece before another that has come already is copied
            if self._owed >= self._limits.credits // 2 and not incoming.is_whole:  # the other half is under way meanwhile
                await self._grant(link, version, [])
            return
        self._broken[index] += 1
        if self._broken[index] % self._limits.max_attempts == 0:
            raise RelayError(f"piece {index} of {version} came broken {self._broken[index]} times, last from {link.peer}")
        await self._grant(link, version, [index])

    async def _grant(self, link: Link, version: str, again: list[int]) -> None:
        owed, self._owed = self._owed, 0
        await self._answer(link, More(version, owed, again))

    async def _answer(self, link: Link, message: Message) -> None:
        """Speak to an upstream that may have died: what it had sent before still counts, and then `receive` says so."""
        with suppress(LinkLostError):
            await link.send(message)

    def _finish(self, incoming: Incoming) -> None:
        incoming.reveal()
        self._shelf.arrive(None)
        self._store.prune()
        seconds = time.monotonic() - self._started
        self._report(HopReport(str(incoming.version), seconds, self._num_bytes, self._broken.total()))

    def _abandon(self) -> None:
        incoming = self._shelf.incoming
        if incoming is not None:
            incoming.abandon()
            self._shelf.arrive(None)
