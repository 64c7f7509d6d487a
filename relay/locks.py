"""Advisory file locks (`flock`): leases of readers, and which process owns a store.

Invariants: a lock belongs to an open file and dies with the process that opened it, so a killed holder never blocks anybody;
nothing here ever waits.
Does not know what the locked files mean.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock an open file without waiting; False if another open file holds it in a conflicting mode."""
    mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Give the lock of an open file back."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_same_file(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the open file; False once it was removed or replaced."""
    opened = os.fstat(descriptor)
    try:
        named = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


class FileLock:
    """An exclusive lock on a whole file, held until `release` or death.

    Args:
        descriptor: an open file that is already locked; owned from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, path: Path, *, create: bool) -> Self | None:
        """Lock the file at `path`; None if somebody holds it.

        Raises:
            FileNotFoundError: if `path` vanished meanwhile, or never existed and `create` is false.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        descriptor = os.open(path, flags, 0o600)
        if not try_lock(descriptor, exclusive=True):
            os.close(descriptor)
            return None
        if not is_same_file(descriptor, path):
            os.close(descriptor)
            raise FileNotFoundError(path)
        return cls(descriptor)

    def release(self) -> None:
        """Give the lock back; harmless when repeated."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
