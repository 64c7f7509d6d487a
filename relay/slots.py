"""Slot files: memory that is allocated and touched once, then rewritten in place for one version after another.

Invariants: a slot is written only under its exclusive lock; a slot that is being written is linked by no version's folder.
Does not know versions or tensors.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laminar.config.sizes import slot_bytes
from laminar.errors import EnvironmentSetupError
from relay.locks import try_lock, unlock
from relay.mapped import MappedFile, map_file

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


def required_bytes(file_bytes: int, *, keep_versions: int, mapping_readers: int) -> int:
    """Bytes that one machine holds for a run: slots for the kept versions, the one being written, each mapping reader."""
    return slot_bytes(file_bytes) * num_slots(keep_versions=keep_versions, mapping_readers=mapping_readers)


def num_slots(*, keep_versions: int, mapping_readers: int) -> int:
    """How many slot files a store has."""
    return keep_versions + 1 + mapping_readers


def check_space(root: Path, needed_bytes: int) -> None:
    """Make sure that `root` can take `needed_bytes` more.

    Raises:
        EnvironmentSetupError: if it cannot, or is no folder.
    """
    if not root.is_dir():
        raise EnvironmentSetupError(f"relay.root {str(root)!r} is not a folder: create it, or name another")
    free_bytes = _free_bytes(root)
    if needed_bytes > free_bytes:
        raise no_space("the weight slots", root, needed_bytes, free_bytes)


@contextmanager
def room_for(what: str, folder: Path, needed_bytes: int) -> Iterator[None]:
    """Write into a folder that may be full.

    Raises:
        EnvironmentSetupError: if it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_space(what, folder, needed_bytes, _free_bytes(folder)) from error


def no_space(what: str, root: Path, needed_bytes: int, free_bytes: int) -> EnvironmentSetupError:
    """The error that says how much is missing and what to do."""
    return EnvironmentSetupError(
        f"{what} need {needed_bytes:,} bytes in {root}, where {free_bytes:,} are free: enlarge it by as much as is missing "
        "(in a container: --shm-size), lower relay.keep_versions, or set relay.root to a larger folder"
    )


def _free_bytes(root: Path) -> int:
    system = os.statvfs(root)
    free_bytes = system.f_bavail * system.f_frsize
    # A memory file system promises more than the machine may have; the kernel would then kill a process without a word.
    if _file_system(root) in MEMORY_FILE_SYSTEMS:
        return min(free_bytes, _available_memory_bytes())
    return free_bytes


def _file_system(root: Path) -> str:
    mounts = {Path(fields[1]): fields[2] for fields in map(str.split, Path("/proc/self/mounts").read_text().splitlines())}
    resolved = root.resolve()
    return next((mounts[folder] for folder in (resolved, *resolved.parents) if folder in mounts), "")


def _available_memory_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


class Slot:
    """An open slot file, mapped for writing for as long as the publisher lives.

    Args:
        path: an existing file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.inode = os.fstat(self._descriptor).st_ino
        self._map = map_file(path, self._descriptor, writable=True)

    @property
    def buffer(self) -> MappedFile:
        """The file's bytes, writable."""
        return self._map

    @property
    def num_links(self) -> int:
        """How many names the file has; 1 when no version links to it."""
        return os.fstat(self._descriptor).st_nlink

    def try_lock(self) -> bool:
        """Lock the slot for writing; False while a reader holds a lease on it."""
        return try_lock(self._descriptor, exclusive=True)

    def unlock(self) -> None:
        """End writing; harmless when repeated."""
        unlock(self._descriptor)

    def close(self) -> None:
        """Give lock and file back; the mapping goes with the last reference to it."""
        self.unlock()
        os.close(self._descriptor)


def open_slots(folder: Path, count: int, file_bytes: int) -> list[Slot]:
    """Open `count` slots of exactly `file_bytes`, reusing those that fit and allocating the others.

    A file of another length (the model's layout changed between restarts) is unlinked; a version that still links to it
    keeps its bytes.

    Raises:
        EnvironmentSetupError: if the file system cannot hold them; nothing is left allocated that was not there before.
    """
    paths = [folder / f"{index}.safetensors" for index in range(count)]
    for path in folder.iterdir():
        if path not in paths or path.stat().st_size != file_bytes:
            path.unlink()
    missing = [path for path in paths if not path.exists()]
    check_space(folder, len(missing) * slot_bytes(file_bytes))
    try:
        for path in missing:
            _allocate(path, file_bytes)
    except OSError as error:
        for path in missing:
            path.unlink(missing_ok=True)
        raise no_space("the weight slots", folder, len(missing) * slot_bytes(file_bytes), _free_bytes(folder)) from error
    return [Slot(path) for path in paths]


def _allocate(path: Path, file_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, file_bytes)
    finally:
        os.close(descriptor)
