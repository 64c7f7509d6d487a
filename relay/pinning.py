"""Slots registered as pinned memory: a trainer's GPU then copies into them directly, without a staging buffer.

Without a GPU nothing happens. A slot that cannot be registered (a limit on locked memory) is used as it is, slower, and that
is logged. Does not know versions.
"""

import logging
from collections.abc import Sequence

import torch

from relay.slots import Slot

logger = logging.getLogger("laminar.relay")


def pin_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Register slots, once each; returns those that were."""
    if not torch.cuda.is_available():
        return []
    pinned = [slot for slot in slots if _register(slot)]
    if len(pinned) < len(slots):
        logger.warning(
            "%d of %d weight slots cannot be pinned (ulimit -l?): publishing is slower", len(slots) - len(pinned), len(slots)
        )
    return pinned


def unpin_slots(slots: Sequence[Slot]) -> None:
    """Undo `pin_slots`."""
    for slot in slots:
        torch.cuda.cudart().cudaHostUnregister(_address(slot))


def _register(slot: Slot) -> bool:
    return int(torch.cuda.cudart().cudaHostRegister(_address(slot), len(slot.buffer), 0)) == 0


def _address(slot: Slot) -> int:
    return int(torch.frombuffer(slot.buffer, dtype=torch.uint8).data_ptr())
