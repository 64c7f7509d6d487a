"""One file of the replay spool: a step's groups, its progress and its data cursor. Files only, no torch.

    "LMSP", format version, length and checksum of the header; the header (JSON); one codec frame a trajectory

Invariants: the file appears whole, by one rename, after its bytes are synced; what is torn or flipped is found by checksum.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from laminar.codec import decode_trajectory, encode_trajectory
from laminar.errors import ConfigError, ExperienceError, LaminarError
from laminar.experience.answers import Frontier, Occurrence
from laminar.types import Trajectory
from laminar.whole_file import sync
from trainer.progress import Progress

FORMAT_VERSION = 1
"""Written into every file; a reader refuses what it does not know."""

_MAGIC = b"LMSP"
_PREFIX = struct.Struct("<4sIQQ")
_CHUNK_BYTES = 1 << 24


class SpoolError(LaminarError):
    """A spool file that cannot be read: missing, torn or damaged."""


@dataclass(frozen=True, slots=True)
class SpooledGroup:
    """One group of a step: which prompt it played, and the lengths in bytes of its trajectories' frames, in order."""

    group_id: str
    occurrence: Occurrence
    frames: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SpooledStep:
    """A file's header.

    Attributes:
        progress: after the step.
        frontier: the data cursor once the step is trained.
        batch: digest of its sampled tokens, as logged.
        groups: in training order.
        checksum: of all frames, xxh3, 128 bits.
        oldest_trained: tokens of versions below this number were not trained; None in files that do not say it.
    """

    progress: Progress
    frontier: Frontier
    batch: str
    groups: tuple[SpooledGroup, ...]
    checksum: str = ""
    oldest_trained: int | None = None

    @property
    def step(self) -> int:
        """The step's number."""
        return self.progress.step


def write_step(path: Path, header: SpooledStep, groups: Sequence[Sequence[Trajectory]]) -> int:
    """Write a step's file; replaces one that is there.

    Args:
        path: of the file.
        header: its `groups` name the groups; lengths and checksum are filled in.
        groups: their trajectories, in the same order.

    Returns:
        The file's length in bytes.

    Raises:
        OSError: it cannot be written; a file that was there stands.
    """
    frames = [[encode_trajectory(trajectory) for trajectory in group] for group in groups]
    digest = xxhash.xxh3_128()
    for frame in (frame for group in frames for frame in group):
        digest.update(frame)
    described = tuple(replace(g, frames=tuple(map(len, part))) for g, part in zip(header.groups, frames, strict=True))
    packed = msgspec.json.encode(replace(header, groups=described, checksum=digest.hexdigest()))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_PREFIX.pack(_MAGIC, FORMAT_VERSION, len(packed), xxhash.xxh3_64_intdigest(packed)))
            file.write(packed)
            file.writelines(frame for part in frames for frame in part)
            file.flush()
            os.fsync(file.fileno())
            length = file.tell()
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk it would take what others need
        raise
    temporary.replace(path)
    sync(path.parent)
    return length


def read_header(path: Path) -> SpooledStep:
    """What a file says of itself.

    Raises:
        SpoolError: it is missing, torn or damaged.
        ConfigError: it is of another format version.
    """
    with _opened(path) as file:
        return _header(file)


def verify_step(path: Path) -> SpooledStep:
    """Read a whole file and compare its checksum; answers its header. Raises as `read_header`."""
    with _opened(path) as file:
        header, digest = _header(file), xxhash.xxh3_128()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != header.checksum:
        raise SpoolError(f"spool file {path} is torn or damaged: its checksum does not match")
    return header


def read_groups(path: Path) -> tuple[tuple[Trajectory, ...], ...]:
    """A step's groups, in training order. Raises as `read_header`."""
    with _opened(path) as file:
        header = _header(file)
        try:
            return tuple(tuple(decode_trajectory(file.read(n)) for n in group.frames) for group in header.groups)
        except ExperienceError as error:
            raise SpoolError(f"spool file {path} is torn or damaged: {error}") from error


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise SpoolError(f"spool file {path} cannot be read ({error})") from error


def _header(file: BinaryIO) -> SpooledStep:
    """Read the header, and leave the file at the first frame."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise SpoolError(f"spool file {file.name} is torn: it ends within its first {_PREFIX.size} bytes")
    magic, version, length, checksum = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise SpoolError(f"{file.name} is no spool file")
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"spool file {file.name} has format version {version}, but this program reads {FORMAT_VERSION}: "
            "resume with the version that wrote it"
        )
    packed = file.read(length)
    if len(packed) < length or xxhash.xxh3_64_intdigest(packed) != checksum:
        raise SpoolError(f"spool file {file.name} is torn or damaged: its header's checksum does not match")
    return msgspec.json.decode(packed, type=SpooledStep)
