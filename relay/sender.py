"""The upstream's half of a hop: offers what is newer, and sends each piece as soon as it is held verified.

Invariants: at most the granted credits are under way; the version being sent is held until its downstream asks for the next;
one downstream's slowness, faults or death touch nobody else.
Does not know who else is served, or where versions come from.
"""

import asyncio
import heapq
import logging
from contextlib import ExitStack

from laminar.errors import DeadlineError, RelayError
from laminar.policies.chain import pick_offer
from laminar.types import WeightVersion
from relay.link import Credentials, HopLimits, Link, admit
from relay.messages import Alive, Chunk, FetchFiles, Files, Gone, Message, More, Offer, Pull, Want
from relay.model_files import pack_files
from relay.shelf import Shelf, Source
from relay.store import VersionStore
from relay.transports.base import Connection

logger = logging.getLogger("laminar.relay")


class Sender:
    """Serves downstreams.

    Args:
        store: this machine's store.
        shelf: what can be passed on.
        credentials: of this relay.
        limits: deadlines.
    """

    def __init__(self, store: VersionStore, shelf: Shelf, credentials: Credentials, limits: HopLimits) -> None:
        self._store, self._shelf, self._credentials, self._limits = store, shelf, credentials, limits

    async def serve(self, connection: Connection) -> None:
        """Serve one downstream until it leaves, dies or breaks the protocol."""
        link = Link(connection, "a relay that connects", self._limits)
        try:
            await admit(link, self._credentials)
            await _Session(link, self._store, self._shelf, self._limits).run()
        except* (RelayError, DeadlineError) as errors:
            logger.info("a downstream is served no more: %s", errors.exceptions[0])


class _Session:
    """One downstream."""

    def __init__(self, link: Link, store: VersionStore, shelf: Shelf, limits: HopLimits) -> None:
        self._link, self._store, self._shelf, self._limits = link, store, shelf, limits
        self._want: Want | None = None
        self._wants_files = False
        self._held = ExitStack()
        self._source: Source | None = None
        self._pending: list[int] = []
        """Pieces to send, a heap: they are sent in order, so a hop's pieces arrive in order at the next one too."""
        self._credits = 0

    async def run(self) -> None:
        """Listen and speak until the downstream is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen())
                group.create_task(self._speak())
        finally:
            self._drop()

    async def _listen(self) -> None:
        """Consumes: the downstream's wishes. Waits for: the next; it says `Alive` when it has none."""
        while True:
            message, _ = await self._link.receive("the next request")
            self._note(message)
            if not isinstance(message, Alive):
                self._shelf.notify()

    def _note(self, message: Message) -> None:
        match message:
            case Want():
                self._drop()
                self._want = message
            case FetchFiles():
                self._wants_files = True
            case Pull(version, missing, credit) if self._is_sending(version):
                self._pending = [index for first, end in missing for index in range(first, end)]
                heapq.heapify(self._pending)
                self._credits = credit
            case More(version, credit, again) if self._is_sending(version):
                for index in again:
                    heapq.heappush(self._pending, index)
                self._credits += credit
            case Pull() | More() | Alive():  # of a version that has gone meanwhile: it was told
                return
            case _:
                raise RelayError(f"{self._link.peer} said {type(message).__name__} to its upstream")

    def _is_sending(self, version: str) -> bool:
        return self._source is not None and str(self._source.manifest.version) == version

    async def _speak(self) -> None:
        """Produces: offers, files, pieces. Waits for: a wish that can be met. Unblocked by: the shelf, or the downstream."""
        while True:
            changed = self._shelf.changed
            if await self._say_something():
                continue
            try:
                async with asyncio.timeout(self._limits.alive_seconds):
                    await changed.wait()
            except TimeoutError:
                await self._link.send(Alive())

    async def _say_something(self) -> bool:
        """One message, if there is one to send."""
        if self._want is not None:
            return await self._offer(self._want)
        if self._wants_files:
            return await self._send_files()
        source = self._source
        if source is None:
            return False
        if source.is_gone:
            self._drop()
            await self._link.send(Gone(str(source.manifest.version)))
            return True
        if not (self._credits > 0 and self._pending and source.has(self._pending[0])):
            return False
        index = heapq.heappop(self._pending)
        self._credits -= 1
        await self._link.send(Chunk(str(source.manifest.version), index), source.read(index))
        return True

    async def _offer(self, want: Want) -> bool:
        version = pick_offer(self._shelf.held(), newer_than=_parse(want.newer_than), resuming=_parse(want.resuming))
        if version is None:
            return False
        try:
            files = self._shelf.model_files()
            self._source = self._held.enter_context(self._shelf.open(version))
        except RelayError:
            return True  # it went between the two calls: choose again
        except FileNotFoundError:
            return False  # a trainer that starts replaces the model's files: look again in a moment
        self._want = None
        await self._link.send(Offer(str(version), self._source.manifest.to_json(), files))
        return True

    async def _send_files(self) -> bool:
        try:
            sizes, body = pack_files(self._store.model_files)
        except FileNotFoundError:
            return False  # as in `_offer`
        self._wants_files = False
        await self._link.send(Files(sizes), memoryview(body))
        return True

    def _drop(self) -> None:
        """Let go of the version being sent."""
        self._source, self._pending, self._credits = None, [], 0
        self._held.close()


def _parse(text: str) -> WeightVersion | None:
    return WeightVersion.parse(text) if text else None
