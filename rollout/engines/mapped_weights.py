"""A folder's `model.safetensors`, mapped into this process.

Invariants: tensors lie in the mapped file, nothing is copied; a shared `flock` is held on the very file that is mapped
until `close` (or death), so a relay never rewrites it meanwhile; the file is the one its path named after the lock was
taken. This module does not know models.
"""

import fcntl
import itertools
import json
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

from laminar.errors import EngineError, reason
from relay.manifest import CHUNK_BYTES, Manifest, checksum
from relay.store import MANIFEST_NAME, WEIGHTS_NAME

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class MappedWeights:
    """The tensors of one weights file.

    Args:
        folder: holds `model.safetensors`.

    Raises:
        EngineError: if the file is missing, being rewritten, replaced, or not in the safetensors format.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / WEIGHTS_NAME
        self._descriptor = lock_shared(self.path)
        with ExitStack() as undo:
            undo.callback(os.close, self._descriptor)
            self.tensors = map_tensors(self._descriptor, self.path)
            undo.pop_all()

    def read_back(self) -> tuple[str, str]:
        """Read every mapped byte.

        Returns:
            Its checksum (xxh3_64 over those of the pieces), and how it differs from the manifest beside the file: empty if
            it does not, or there is none.
        """
        storage = next(iter(self.tensors.values())).untyped_storage()
        data: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data  # type: ignore[arg-type,unused-ignore]
        path = self.path.with_name(MANIFEST_NAME)
        manifest = Manifest.from_json(path.read_text()) if path.is_file() else None
        size = manifest.chunk_bytes if manifest else CHUNK_BYTES
        pieces = tuple(checksum(data[start : start + size]) for start in range(0, len(data), size))
        problem = ""
        if manifest is not None and pieces != manifest.checksums:
            pairs = itertools.zip_longest(pieces, manifest.checksums)
            first = next(index for index, (found, expected) in enumerate(pairs) if found != expected)
            problem = f"piece {first} of {len(manifest.checksums)} is not what was published"
        return checksum("".join(pieces).encode()), problem

    def close(self) -> None:
        """Give the lock back. Memory stays mapped until the last tensor is dropped; nobody may read those any more."""
        self.tensors = {}
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lock_shared(path: Path) -> int:
    """Open and lock `path`; returns the descriptor.

    Raises:
        EngineError: if the file is not there to be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"cannot open {path}: {error.strerror}; name a folder that holds {WEIGHTS_NAME}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        opened, named = os.fstat(descriptor), os.stat(path)
    except OSError as error:
        os.close(descriptor)
        raise EngineError(f"{path} is being rewritten or was removed; take the newest version") from error
    if (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino):
        os.close(descriptor)
        raise EngineError(f"{path} was replaced while it was opened; take the newest version")
    return descriptor


def map_tensors(descriptor: int, path: Path) -> dict[str, torch.Tensor]:
    """Views, by name, into the mapping of an open safetensors file.

    Raises:
        EngineError: if the header or a length does not fit the file.
    """
    num_bytes = os.fstat(descriptor).st_size
    try:
        header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if header_bytes > num_bytes - 8:
            raise ValueError(f"its header would take {header_bytes} of {num_bytes} bytes")
        header = json.loads(os.pread(descriptor, header_bytes, 8))
        # by descriptor, not by path: what is mapped is what is locked
        source = f"/proc/self/fd/{descriptor}"
        storage = cast(torch.UntypedStorage, torch.UntypedStorage.from_file(source, shared=False, nbytes=num_bytes))
        start = 8 + header_bytes
        return {name: view(storage, start, entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{path} is not a whole safetensors file ({reason(error)}); publish the version again") from error


def view(storage: torch.UntypedStorage, start: int, entry: dict[str, object]) -> torch.Tensor:
    """One tensor of the file, by its header entry."""
    dtype = DTYPES[str(entry["dtype"])]
    shape = tuple(int(size) for size in entry["shape"])  # type: ignore[attr-defined]
    first, last = (int(offset) for offset in entry["data_offsets"])  # type: ignore[attr-defined]
    if last - first != math.prod(shape) * dtype.itemsize or start + last > storage.nbytes() or first < 0:
        raise ValueError(f"a tensor of shape {shape} cannot lie at bytes [{first}, {last})")
    if (start + first) % dtype.itemsize:
        raise ValueError(f"a tensor of {dtype} is not aligned at byte {start + first}")
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(storage, (start + first) // dtype.itemsize, shape)  # type: ignore[call-overload]
