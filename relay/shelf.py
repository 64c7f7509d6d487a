"""What a relay can pass on now: the complete versions of its store, and the one that is arriving.

Invariants: a complete version is passed on under a lease of its own; whoever waits is woken by every piece, every version
and every change of mind.
Does not know transports or who asks.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from laminar.types import WeightVersion
from relay.incoming import Incoming
from relay.manifest import Manifest
from relay.mapped import map_file
from relay.model_files import describe_files
from relay.store import MANIFEST_NAME, WEIGHTS_NAME, VersionStore


class Source(Protocol):
    """A version that is being passed on."""

    manifest: Manifest
    is_gone: bool

    def has(self, index: int) -> bool:
        """Whether a piece can be read."""

    def read(self, index: int) -> memoryview:
        """The bytes of a piece; they stay as they are while the source is open and not gone."""


class _Complete:
    """A version of the store, leased and mapped."""

    def __init__(self, manifest: Manifest, data: memoryview) -> None:
        self.manifest, self._data = manifest, data
        self.is_gone = False

    def has(self, index: int) -> bool:
        return True

    def read(self, index: int) -> memoryview:
        size = self.manifest.chunk_bytes
        return self._data[index * size : (index + 1) * size]


class Shelf:
    """A relay's versions, as its downstreams see them.

    Args:
        store: this machine's store.
    """

    def __init__(self, store: VersionStore) -> None:
        self._store = store
        self._changed = asyncio.Event()
        self.incoming: Incoming | None = None

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change. Take it before looking, then wait for it."""
        return self._changed

    def notify(self) -> None:
        """Wake all who wait."""
        self._changed.set()
        self._changed = asyncio.Event()

    def arrive(self, incoming: Incoming | None) -> None:
        """From now on this is the version that is arriving."""
        self.incoming = incoming
        self.notify()

    def held(self) -> list[WeightVersion]:
        """Versions that can be offered."""
        arriving = [self.incoming.version] if self.incoming is not None else []
        return [*self._store.versions(), *arriving]

    @contextmanager
    def open(self, version: WeightVersion) -> Iterator[Source]:
        """Hold a version while it is passed on.

        Raises:
            RelayError: if it has just gone.
        """
        incoming = self.incoming
        if incoming is not None and incoming.version == version:
            incoming.open()
            try:
                yield incoming
            finally:
                incoming.close()
            return
        with self._store.lease(version) as folder, (folder / WEIGHTS_NAME).open("rb") as file:
            # Not closed by name: a transport may hold a piece a little longer than we do, and the last one closes it.
            mapped = memoryview(map_file(self._store.slot_path(version), file.fileno()))
            yield _Complete(Manifest.from_json((folder / MANIFEST_NAME).read_text()), mapped)

    def model_files(self) -> dict[str, str]:
        """Names and checksums of the model's other files; FileNotFoundError if they are being replaced."""
        return describe_files(self._store.model_files)
