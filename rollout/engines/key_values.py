"""Keys and values of all running requests: one row a request, written in place.

Invariants: active rows are 0 … n-1, so attention reads plain slices; memory is anonymous and private, so only pages that
were written take space, and pages of inactive rows can be given back; unwritten places are zero, never garbage (0 times NaN
is NaN).
Layout a layer: keys and values (R, K, T, D): R rows, K key-value heads, T tokens, D head size. This module does not know
requests.
"""

import math
import mmap
from dataclasses import dataclass

import torch

ROW_STEP_TOKENS = 64
"""Row lengths are multiples of this: rows then begin on pages (64 tokens x 16 or more float32)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that the model fixes."""

    num_layers: int
    num_heads: int
    head_size: int
    dtype: torch.dtype


class KeyValues:
    """Preallocated rows.

    Args:
        shape: the model's sizes.
        num_rows: the most requests that run at once.
        row_tokens: first length of a row; grows by doubling when a longer request comes.
    """

    def __init__(self, shape: Shape, num_rows: int, row_tokens: int = 512) -> None:
        self._shape = shape
        self._num_rows = num_rows
        self.row_tokens = -(-row_tokens // ROW_STEP_TOKENS) * ROW_STEP_TOKENS
        self._allocate()

    def _allocate(self) -> None:
        shape = self._shape
        sizes = (2, self._num_rows, shape.num_heads, self.row_tokens, shape.head_size)
        num_bytes = math.prod(sizes) * shape.dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._maps = [mmap.mmap(-1, num_bytes, flags=flags) for _ in range(shape.num_layers)]
        layers = [torch.frombuffer(memory, dtype=shape.dtype).view(sizes) for memory in self._maps]
        self.keys = [layer[0] for layer in layers]
        self.values = [layer[1] for layer in layers]

    def fit(self, num_tokens: int, num_active: int) -> None:
        """Make rows at least `num_tokens` long, keeping the active ones."""
        if num_tokens <= self.row_tokens:
            return
        width, keys, values = self.row_tokens, self.keys, self.values
        while self.row_tokens < num_tokens:
            self.row_tokens *= 2
        self._allocate()
        for layer in range(self._shape.num_layers):
            self.keys[layer][:num_active, :, :width] = keys[layer][:num_active]
            self.values[layer][:num_active, :, :width] = values[layer][:num_active]

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one row to another."""
        for stored in (*self.keys, *self.values):
            stored[target, :, :num_tokens] = stored[source, :, :num_tokens]

    def save_row(self, row: int, num_tokens: int) -> torch.Tensor:
        """(2L, K, T, D): a copy of a row's first tokens."""
        return torch.stack([stored[row, :, :num_tokens] for stored in (*self.keys, *self.values)])

    def load_row(self, row: int, saved: torch.Tensor) -> None:
        """Write what `save_row` returned."""
        for stored, part in zip((*self.keys, *self.values), saved.unbind(), strict=True):
            stored[row, :, : saved.shape[2]] = part

    def release(self, num_active: int) -> None:
        """Give the pages of all rows from `num_active` on back to the system; they read as zero afterwards."""
        shape = self._shape
        row_bytes = shape.num_heads * self.row_tokens * shape.head_size * shape.dtype.itemsize
        half = self._num_rows * row_bytes
        # a head size so small that rows do not fill pages: round inwards, for whole pages only may go
        start = -(-num_active * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        length = half - start
        if length <= 0 or half % mmap.PAGESIZE:
            return
        for memory in self._maps:
            memory.madvise(mmap.MADV_DONTNEED, start, length)
            memory.madvise(mmap.MADV_DONTNEED, half + start, length)
