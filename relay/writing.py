"""Filling one slot: tensors in any order, each checked against the layout, each finished piece of the file checksummed.

Copying and checksumming each take a core for as long: done one after the other they would double the trainer's stall.

Invariants: a slot counts as filled only when every byte was written once; a tensor that does not fit the layout is named.
Does not know versions, locks or folders.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from laminar.errors import RelayError
from relay.manifest import DTYPES, Layout, TensorSpec, checksum, dtype_name, num_chunks
from relay.slots import Slot

TORCH_DTYPES = {stored: getattr(torch, name.removeprefix("torch.")) for name, (stored, _) in DTYPES.items()}
"""Number type as safetensors names it -> torch's."""


COPY_BYTES = 1024**2
"""How much is copied at once: a piece that is complete is checksummed meanwhile, by another thread."""


def fill_slot(slot: Slot, layout: Layout, tensors: Iterable[tuple[str, torch.Tensor]], chunk_bytes: int) -> tuple[str, ...]:
    """Write a whole version into a slot.

    Args:
        slot: locked for writing, `layout.file_bytes` long.
        layout: where each tensor goes.
        tensors: every stored name once, in any order, on any device; tied names may come too, with equal values.
        chunk_bytes: length of a checksummed piece.

    Returns:
        The checksum of every piece.

    Raises:
        RelayError: if a tensor is unknown, missing, repeated, of another shape or kind, or a tied one differs.
    """
    file = torch.frombuffer(slot.buffer, dtype=torch.uint8)
    with ThreadPoolExecutor(1, "relay-checksums") as hashing:
        checksums = _Checksums(memoryview(slot.buffer), chunk_bytes, hashing)
        slot.buffer[: len(layout.header)] = layout.header
        checksums.written(0, len(layout.header))
        _write_tensors(tensors, layout, file, checksums)
        return checksums.result()


def _write_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], layout: Layout, file: torch.Tensor, checksums: "_Checksums"
) -> None:
    written: set[str] = set()
    aliases: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        if name in layout.tied:
            aliases.append((name, tensor))
            continue
        spec = _spec_of(name, layout, written)
        _copy(_checked(name, tensor, spec), file, spec, checksums)
        written.add(name)
    if missing := [name for name in layout.tensors if name not in written]:
        raise RelayError(f"tensor {missing[0]!r} was not published ({len(missing)} missing): a version needs all of them")
    for name, tensor in aliases:
        _check_alias(name, tensor, layout, file)


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


def _copy(tensor: torch.Tensor, file: torch.Tensor, spec: TensorSpec, checksums: "_Checksums") -> None:
    target = _place(file, spec)
    if tensor.dtype != target.dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        target.copy_(tensor)
        checksums.written(spec.offset, spec.nbytes)
        return
    source_bytes = tensor.view(-1).view(torch.uint8).numpy()
    target_bytes = target.view(-1).view(torch.uint8).numpy()
    for start in range(0, spec.nbytes, COPY_BYTES):
        end = min(start + COPY_BYTES, spec.nbytes)
        target_bytes[start:end] = source_bytes[start:end]
        checksums.written(spec.offset + start, end - start)


def _place(file: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return file[spec.offset : spec.offset + spec.nbytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def _check_alias(name: str, tensor: torch.Tensor, layout: Layout, file: torch.Tensor) -> None:
    """A tied weight that was changed alone would be lost without a word: readers get the stored one for both."""
    spec = layout.tensors[layout.tied[name]]
    stored = _place(file, spec)
    if not torch.equal(_checked(name, tensor, spec).to(stored.dtype).cpu(), stored):
        raise RelayError(
            f"tensor {name!r} was tied to {layout.tied[name]!r} at the first publish but differs from it now: "
            "keep them tied, or start with untied weights"
        )


class _Checksums:
    """Checksums each piece of a file in another thread as soon as its last byte was written, while others are copied."""

    def __init__(self, data: memoryview, chunk_bytes: int, hashing: ThreadPoolExecutor) -> None:
        self._data, self._chunk_bytes, self._hashing = data, chunk_bytes, hashing
        count = num_chunks(len(data), chunk_bytes)
        self._missing = [min(chunk_bytes, len(data) - index * chunk_bytes) for index in range(count)]
        self._done: dict[int, Future[str]] = {}

    def written(self, offset: int, nbytes: int) -> None:
        """Note that bytes [offset, offset + nbytes) are final."""
        size = self._chunk_bytes
        for index in range(offset // size, num_chunks(offset + nbytes, size)):
            first, last = index * size, min((index + 1) * size, len(self._data))
            self._missing[index] -= min(offset + nbytes, last) - max(offset, first)
            if self._missing[index] == 0:
                self._done[index] = self._hashing.submit(checksum, self._data[first:last])

    def result(self) -> tuple[str, ...]:
        """All checksums; every byte must have been written."""
        return tuple(self._done[index].result() for index in range(len(self._missing)))
