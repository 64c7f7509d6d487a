"""A version that is arriving: a locked slot, the manifest, and which pieces are verified.

Invariants: a piece counts only with its checksum; a verified piece is never written again; the pieces may be read (to pass
them on) as soon as they are verified, and stay readable after the version has been revealed for as long as anybody reads.
Does not know where pieces come from.
"""

from contextlib import ExitStack

from laminar.types import WeightVersion
from relay.manifest import Manifest, checksum
from relay.reveal import reveal
from relay.slots import Slot
from relay.store import VersionStore
from relay.transports.base import Received


class Incoming:
    """A version on its way into the store.

    Args:
        store: where it will appear.
        slot: locked for writing, as long as the manifest says.
        manifest: what it will be.
    """

    def __init__(self, store: VersionStore, slot: Slot, manifest: Manifest) -> None:
        self._store, self._slot = store, slot
        self.manifest = manifest
        self._data = memoryview(slot.buffer)
        self._missing = set(range(len(manifest.checksums)))
        self._lease = ExitStack()
        self._num_readers = 0
        self.is_gone = False

    @property
    def version(self) -> WeightVersion:
        """Which version it is."""
        return self.manifest.version

    @property
    def missing(self) -> list[int]:
        """Pieces that are not verified yet, in order."""
        return sorted(self._missing)

    @property
    def is_whole(self) -> bool:
        """Whether every piece is verified."""
        return not self._missing

    def has(self, index: int) -> bool:
        """Whether a piece is verified."""
        return index not in self._missing

    def read(self, index: int) -> memoryview:
        """The bytes of a verified piece."""
        return self._piece(index)

    def place(self, index: int, num_bytes: int) -> memoryview | None:
        """Where to write a piece that arrives; None if it is verified already, unknown, or of a wrong length."""
        if index not in self._missing or len(self._piece(index)) != num_bytes:
            return None
        return self._piece(index)

    def accept(self, index: int, received: Received) -> bool:
        """Verify a piece that was written where `place` said; False if it is broken, or there was no place for it."""
        piece = self.place(index, received.num_bytes)
        if piece is None or (received.checksum or checksum(piece)) != self.manifest.checksums[index]:
            return False
        self._missing.discard(index)
        return True

    def reveal(self) -> None:
        """Make the whole version appear in the store; those who still read it here get a lease on it."""
        reveal(self._store, self.manifest, self._slot)
        if self._num_readers:
            self._lease.enter_context(self._store.lease(self.version))

    def abandon(self) -> None:
        """Give the slot back unfinished; readers are told by `is_gone`."""
        self.is_gone = True
        self._slot.unlock()

    def open(self) -> None:
        """One more reader."""
        self._num_readers += 1

    def close(self) -> None:
        """One reader less; with the last the lease ends."""
        self._num_readers -= 1
        if self._num_readers == 0:
            self._lease.close()

    def _piece(self, index: int) -> memoryview:
        size = self.manifest.chunk_bytes
        return self._data[index * size : (index + 1) * size]
