"""Filling one slot: tensors in any order, each checked against the layout; then the checksums of its pieces.

Invariants: a slot counts as filled only when every byte was written once; a tensor that does not fit the layout is named.
Does not know versions, locks or folders.
"""

from collections.abc import Iterable

import torch

from laminar.errors import RelayError
from relay.manifest import DTYPES, Layout, TensorSpec, checksum, dtype_name
from relay.slots import Slot

TORCH_DTYPES = {stored: getattr(torch, name.removeprefix("torch.")) for name, (stored, _) in DTYPES.items()}
"""Number type as safetensors names it -> torch's."""


def fill_slot(slot: Slot, layout: Layout, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a whole version into a slot.

    Args:
        slot: locked for writing, `layout.file_bytes` long.
        layout: where each tensor goes.
        tensors: every stored name once, in any order, on any device; tied names may come too, with equal values.

    Raises:
        RelayError: if a tensor is unknown, missing, repeated, of another shape or kind, or a tied one differs.
    """
    file = torch.frombuffer(slot.buffer, dtype=torch.uint8)
    slot.buffer[: len(layout.header)] = layout.header
    written: set[str] = set()
    aliases: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        if name in layout.tied:
            aliases.append((name, tensor))
            continue
        spec = _spec_of(name, layout, written)
        _place(file, spec).copy_(_checked(name, tensor, spec))
        written.add(name)
    if missing := [name for name in layout.tensors if name not in written]:
        raise RelayError(f"tensor {missing[0]!r} was not published ({len(missing)} missing): a version needs all of them")
    for name, tensor in aliases:
        _check_alias(name, tensor, layout, file)


def piece_checksums(slot: Slot, chunk_bytes: int) -> tuple[str, ...]:
    """The checksum of every piece of a filled slot."""
    data = memoryview(slot.buffer)
    return tuple(checksum(data[start : start + chunk_bytes]) for start in range(0, len(data), chunk_bytes))


def flat_place(file: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Where a tensor lies in a file's bytes: its elements, 1-D, not copies."""
    return file[spec.offset : spec.offset + spec.nbytes].view(TORCH_DTYPES[spec.dtype])


def _spec_of(name: str, layout: Layout, written: set[str]) -> TensorSpec:
    if name in written:
        raise RelayError(f"tensor {name!r} was published twice in one version")
    try:
        return layout.tensors[name]
    except KeyError:
        raise RelayError(f"tensor {name!r} is not in the layout fixed at the first publish") from None


def _checked(name: str, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if tuple(tensor.shape) != spec.shape:
        raise RelayError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the layout {spec.shape}")
    same_kind = tensor.dtype.is_floating_point == TORCH_DTYPES[spec.dtype].is_floating_point
    if dtype_name(name, tensor) != spec.dtype and not (same_kind and tensor.dtype.is_floating_point):
        raise RelayError(f"tensor {name!r} has the number type {tensor.dtype}, the layout {spec.dtype}")
    return tensor.detach()


def _place(file: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return flat_place(file, spec).view(spec.shape)


def _check_alias(name: str, tensor: torch.Tensor, layout: Layout, file: torch.Tensor) -> None:
    """A tied weight that was changed alone would be lost without a word: readers get the stored one for both."""
    spec = layout.tensors[layout.tied[name]]
    stored = _place(file, spec)
    if not torch.equal(_checked(name, tensor, spec).to(stored.dtype).cpu(), stored):
        raise RelayError(
            f"tensor {name!r} was tied to {layout.tied[name]!r} at the first publish but differs from it now: "
            "keep them tied, or start with untied weights"
        )
