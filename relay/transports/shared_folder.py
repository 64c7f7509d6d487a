"""Another relay's folder of files, read in place: how two relays find that they share it, and what is read of it.

Invariants: a folder counts as shared only if both ends run under one kernel, in one network namespace, and the folder that
is opened is the one that was meant (device and inode) and belongs to this process's user; only plain files in it are opened,
by plain names, for reading. Nothing of this is on disk: it ends with the process at the latest.
Does not know edges, or what lies in the files.
"""

import os
import stat
from pathlib import Path
from typing import Self

import msgspec

from relay.mapped import MappedFile, map_file

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def this_machine() -> str:
    """Which kernel and which network namespace this thread runs in; empty if the system does not say."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {Path('/proc/thread-self/ns/net').stat().st_ino}"
    except OSError:
        return ""


class FolderOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where files lie, and how somebody else can tell that what it finds there is the same folder."""

    machine: str
    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, machine: str, folder: Path) -> Self:
        """Describe a folder of this machine.

        Raises:
            OSError: there is none.
        """
        found = folder.stat()
        return cls(machine, str(folder), found.st_dev, found.st_ino)


class FilePart(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file in an offered folder, by its name and inode, offset and length in bytes."""

    name: str
    inode: int
    offset: int
    num_bytes: int


class SharedFolder:
    """A folder that is open for reading.

    Args:
        descriptor: of the folder; owned from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._files: dict[str, MappedFile] = {}
        """Mapped at the first use and kept: the slots of a store are few."""

    @classmethod
    def open(cls, offer: FolderOffer, machine: str) -> Self | None:
        """The folder that is offered, if this machine has it and the user owns it; else None."""
        if not machine or offer.machine != machine:
            return None
        try:
            descriptor = os.open(offer.path, _READ | os.O_DIRECTORY)
        except (OSError, ValueError):
            return None
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino, found.st_uid) != (offer.device, offer.inode, os.geteuid()):
            os.close(descriptor)
            return None
        return cls(descriptor)

    def read(self, part: FilePart) -> memoryview | None:
        """The bytes as they lie there now; None if the folder has no such file, or the file no such part."""
        file = self._files.get(part.name)
        if file is None or file.inode != part.inode:
            self._files.pop(part.name, None)
            file = self._map(part.name)
            if file is None or file.inode != part.inode:
                return None
            self._files[part.name] = file
        if part.offset < 0 or part.num_bytes < 1 or part.offset + part.num_bytes > len(file):
            return None
        return memoryview(file)[part.offset : part.offset + part.num_bytes]

    def close(self) -> None:
        """Let go of the folder and of its files."""
        os.close(self._descriptor)
        self._files.clear()

    def _map(self, name: str) -> MappedFile | None:
        if name != os.path.basename(name) or name.startswith("."):
            return None
        try:
            descriptor = os.open(name, _READ | os.O_NONBLOCK, dir_fd=self._descriptor)  # a pipe would hold us up
            try:
                found = os.fstat(descriptor)
                is_file = stat.S_ISREG(found.st_mode) and found.st_size > 0
                return map_file(Path(name), descriptor) if is_file else None
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return None
