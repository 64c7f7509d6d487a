"""Files in memory that know which file they are, so that a piece of one can be named instead of sent.

Invariant: a slot file is allocated whole before anybody maps it and never made shorter, only unlinked: reading a mapping
whose file was cut would kill the reader.
Does not know slots, versions or transports.
"""

import mmap
import os
from pathlib import Path

import numpy as np


class MappedFile(mmap.mmap):
    """A whole file, mapped; made by `map_file`. It goes with the last view of it.

    Attributes:
        path: a name of the file.
        inode: which file that was.
    """

    path: Path
    inode: int


def map_file(path: Path, descriptor: int, *, writable: bool = False) -> MappedFile:
    """Map an open file; the descriptor may be closed afterwards.

    Args:
        path: a name of it.
        descriptor: the open file, not empty.
        writable: for writing too; every page is then touched now: a first write into fresh shared memory costs about ten
            times a rewrite.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if writable else 0)
    mapped = MappedFile(descriptor, 0, flags, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    mapped.path, mapped.inode = path, os.fstat(descriptor).st_ino
    return mapped


def locate(piece: memoryview) -> tuple[MappedFile, int] | None:
    """The file that bytes lie in and where they begin, in bytes; None if they lie in no mapped file."""
    file = piece.obj
    if not isinstance(file, MappedFile) or not len(piece):
        return None
    return file, _address(piece) - _address(memoryview(file))


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
