"""What a trainer's GPU needs to copy into slots: pinned memory, without a staging buffer; a stream beside its computing.

Without a GPU nothing happens. A slot that cannot be registered (a limit on locked memory) is used as it is, slower, and that
is logged. Does not know versions.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from relay.slots import Slot

logger = logging.getLogger("laminar.relay")

Result = TypeVar("Result")


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


def computed_so_far() -> torch.cuda.Event | None:
    """When the GPU has computed what was asked of it so far; None without one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    return torch.cuda.current_stream().record_event()


def run_beside(computed: torch.cuda.Event | None, copy: Callable[[], Result]) -> Result:
    """Copy after `computed` and beside what is asked of the GPU later; returns when the bytes are there."""
    if computed is None:
        return copy()
    stream = torch.cuda.Stream(computed.device)
    stream.wait_event(computed)
    with torch.cuda.stream(stream):
        result = copy()
    stream.synchronize()
    return result


def _register(slot: Slot) -> bool:
    return int(torch.cuda.cudart().cudaHostRegister(_address(slot), len(slot.buffer), 0)) == 0


def _address(slot: Slot) -> int:
    return int(torch.frombuffer(slot.buffer, dtype=torch.uint8).data_ptr())
