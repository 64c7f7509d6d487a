"""What a relay can pass on now: the complete versions of its store, and the one that is arriving.

Invariants: a complete version is passed on under a lease of its own; whoever waits is woken by every piece, every version
and every change of mind.
Does not know transports or who asks.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from laminar.errors import RelayError
from laminar.types import WeightVersion
from relay.incoming import Incoming
from relay.manifest import Manifest, checksum
from relay.mapped import map_file
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
        """Names and checksums of the model's other files."""
        return describe_files(self._store.model_files)


def describe_files(folder: Path) -> dict[str, str]:
    """Name -> xxh3_64 of every finished file in a folder."""
    names = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return {path.name: checksum(path.read_bytes()) for path in sorted(names)}


def pack_files(folder: Path) -> tuple[list[tuple[str, int]], bytes]:
    """The finished files of a folder: (name, bytes) of each, and all their contents, one after another."""
    contents = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    return [(name, len(data)) for name, data in contents], b"".join(data for _, data in contents)


def unpack_files(folder: Path, sizes: list[tuple[str, int]], body: bytes, expected: dict[str, str]) -> None:
    """Replace the files of a folder by those that were sent, each by one rename.

    Raises:
        RelayError: if they are not what was offered; nothing is replaced then.
    """
    contents: dict[str, bytes] = {}
    start = 0
    for name, num_bytes in sizes:
        contents[name] = body[start : start + num_bytes]
        start += num_bytes
    if start != len(body) or {name: checksum(data) for name, data in contents.items()} != expected:
        raise RelayError("the model's files came broken")
    if unsafe := [name for name in contents if Path(name).name != name or name.startswith(".")]:
        raise RelayError(f"a model file is called {unsafe[0]!r}, which is no plain file name")
    for path in folder.iterdir():
        if path.name not in contents:
            path.unlink()
    for name, data in contents.items():
        hidden = folder / f".arriving-{name}"
        hidden.write_bytes(data)
        hidden.rename(folder / name)
