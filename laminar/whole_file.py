"""A small file that is there whole: who reads it meanwhile, or after a kill, finds the old content or the new.

It is replaced in one rename. What is appended to a file that grows is there whole too, unless a kill comes in the middle.
A loss of power may leave either torn, unless the file was replaced with `synced`: then the old content or the new is there.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, content: str | bytes, *, mode: int = 0o666, synced: bool = False) -> None:
    """Write a file in one rename.

    Args:
        path: of the file; beside it the same name with the ending `.tmp` is used, so one process at a time writes it.
        content: text is written as UTF-8.
        mode: permissions, before the process's mask.
        synced: wait until the content is on the disk.

    Raises:
        OSError: it cannot be written; a file that was there stands.
    """
    with replacing(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if synced:
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """The same piece by piece: what is written to the file that this gives takes the old one's place when the block ends.

    Raises:
        OSError: it cannot be written; a file that was there stands.
    """
    temporary = path.with_suffix(".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        yield file
    os.replace(temporary, path)


def sync(place: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_whole(path: Path, content: bytes) -> int:
    """Add to the end of a file, which is made if it is not there: all of it, or nothing; returns the file's size, bytes.

    Raises:
        OSError: it cannot be written; the file is as it was, so what is appended later does not follow half of this.
    """
    with path.open("ab", buffering=0) as file:
        size, rest = file.tell(), memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            raise
        return size + len(content)
