"""One trainer rank's share of a slot: stretches of tensors, written while other processes of the machine write theirs.

Invariants: the slot is locked by the publisher, who has announced it; a process that ever wrote into a slot of another holds
the store's `RANK` lock until it dies, so no later publisher begins while one may still write.
Does not know which rank has which stretch, or how ranks talk.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laminar.errors import RelayError
from relay.locks import try_lock
from relay.manifest import Layout
from relay.pinning import pin_slots
from relay.slots import Slot
from relay.store import RANK
from relay.writing import flat_place


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Part of a tensor: `values` (1-D, any device, cast when written) are its flattened elements from `start` on."""

    name: str
    start: int
    values: Tensor


def even_stretches(named: Sequence[tuple[str, Tensor]], rank: int, num_ranks: int) -> list[Stretch]:
    """A rank's part of tensors that stand in a row: each rank has an equal number of elements, one at most more or less.

    Args:
        named: whole tensors, in the same order on every rank.
        rank: this rank.
        num_ranks: how many there are.
    """
    total = sum(tensor.numel() for _, tensor in named)
    first, last = total * rank // num_ranks, total * (rank + 1) // num_ranks
    stretches, offset = [], 0
    for name, tensor in named:
        start, end = max(first - offset, 0), min(last - offset, tensor.numel())
        if start < end:
            stretches.append(Stretch(name, start, tensor.detach().reshape(-1)[start:end]))
        offset += tensor.numel()
    return stretches


def write_stretches(slot: Slot, layout: Layout, stretches: Iterable[Stretch]) -> int:
    """Write stretches to their places in a slot; returns the bytes written.

    Raises:
        RelayError: a name or an end that the layout does not have, or another kind of number.
    """
    file, num_bytes = torch.frombuffer(slot.buffer, dtype=torch.uint8), 0
    for stretch in stretches:
        if stretch.name not in layout.tensors:
            raise RelayError(f"tensor {stretch.name!r} is not in the layout fixed at the first publish")
        place = flat_place(file, layout.tensors[stretch.name])[stretch.start : stretch.start + len(stretch.values)]
        values = stretch.values
        fits = place.dtype == values.dtype or (place.is_floating_point() and values.is_floating_point())
        if len(place) != len(values) or not fits:
            raise RelayError(
                f"{len(values)} numbers of type {values.dtype} from {stretch.start} on do not fit tensor {stretch.name!r}, "
                f"{layout.tensors[stretch.name].dtype} {layout.tensors[stretch.name].shape} in the layout"
            )
        place.copy_(values)
        num_bytes += place.nbytes
    return num_bytes


class AnnouncedSlots:
    """Slots of the publisher's store, as another process of the machine maps them; each is opened once."""

    def __init__(self) -> None:
        self._slots: dict[Path, Slot] = {}
        self._lock: int | None = None

    def open(self, path: Path, inode: int, file_bytes: int) -> Slot:
        """The slot that the publisher named.

        Raises:
            RelayError: the path leads to another file, or to one of another length; or a new publisher has begun.
            OSError: the file cannot be opened.
        """
        if self._lock is None:
            self._lock = _share_lock(path.parents[1] / f"{RANK}.lock")
        if path not in self._slots:
            slot = Slot(path)
            pin_slots([slot])
            self._slots[path] = slot
        slot = self._slots[path]
        if slot.inode != inode or len(slot.buffer) != file_bytes:
            raise RelayError(f"slot {path} is not the file of {file_bytes:,} bytes that the publisher has locked")
        return slot

    def close(self) -> None:
        """Write no more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _share_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(descriptor, exclusive=False):
        os.close(descriptor)
        raise RelayError(f"{path} is held by a new publisher: this rank belongs to an older one")
    return descriptor
