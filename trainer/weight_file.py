"""Weights in one safetensors file, written and read one tensor at a time.

Does not know models, ranks or checkpoints.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from torch import Tensor

from relay.manifest import load_layout

_COPY_BYTES = 1 << 24


def write_weights(file: Path | None, shapes: Iterable[tuple[str, Tensor]], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors as they come; at most one is held. Whatever fails, all are taken, so that no other rank waits.

    Args:
        file: where; None: only take the tensors, for another rank writes them.
        shapes: what will come, without data.
        tensors: each of them once, in any order.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        if file is not None:
            layout = load_layout(shapes)
            with file.open("wb") as stream:
                stream.write(layout.header)
                for name, tensor in tensors:
                    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                    stream.seek(layout.tensors[name].offset)
                    for start in range(0, len(data), _COPY_BYTES):
                        stream.write(data[start : start + _COPY_BYTES].data)
    finally:
        for _ in tensors:
            pass


class WeightFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when asked for; a context manager.

    Args:
        file: it must not change meanwhile.
    """

    def __init__(self, file: Path) -> None:
        self._file = safe_open(file, framework="pt")
        self._names = list(self._file.keys())

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.__exit__(None, None, None)

    def __getitem__(self, name: str) -> Tensor:
        """A copy of the tensor."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Names in the order of the file."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many tensors."""
        return len(self._names)
