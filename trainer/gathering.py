"""A module's parameters whole, wherever they lie: under ZeRO 3 gathered bucket by bucket, elsewhere as they are.

Invariants: beside the model's own share, one rank holds at most `max_bytes` of gathered parameters, or one parameter if
that is larger; every rank runs the same collectives, even where the caller stops half-way.
Does not know who reads the parameters.
"""

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laminar.errors import ConfigError
from trainer.deepspeed_setup import import_deepspeed

GATHER_BYTES = 256 * 1024**2
"""Default size of a bucket."""

NamedTensors = Sequence[tuple[str, Tensor]]


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO 3 has split it over the ranks."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def without_data(parameter: Tensor) -> Tensor:
    """A tensor of the whole parameter's shape and type that holds nothing."""
    return torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta")


def gathered(named: Iterable[tuple[str, Tensor]], max_bytes: int = GATHER_BYTES) -> Generator[tuple[str, Tensor]]:
    """Whole parameters, one after another; all ranks iterate together.

    What is yielded may be written to only where nothing is partitioned. To stop early, close the generator: it goes on
    gathering without yielding, so that no other rank waits.

    Args:
        named: parameters by name, in the same order on every rank.
        max_bytes: size of a bucket.
    """
    is_wanted = True
    for bucket in buckets(list(named), max_bytes):
        with _whole(bucket):
            for name, parameter in bucket:
                if is_wanted:
                    try:
                        yield name, parameter.detach()
                    except GeneratorExit:
                        is_wanted = False


@torch.no_grad()
def load_tensors(own: NamedTensors, saved: Mapping[str, Tensor], origin: str) -> None:
    """Copy saved tensors into a module's own; all ranks call it together.

    Args:
        own: parameters and buffers by name, in the same order on every rank.
        saved: whole tensors by name, the same on every rank.
        origin: whose they are, for the error.

    Raises:
        ConfigError: if a name or a shape is another model's.
    """
    for name in sorted({name for name, _ in own} ^ saved.keys()):
        raise ConfigError(f"the checkpoint is of another model than {origin}: only one of them has a tensor {name}")
    for bucket in buckets(own, GATHER_BYTES):
        with _whole(bucket, modifier_rank=0):
            for name, tensor in bucket:
                value = saved[name]
                if value.shape != tensor.shape:
                    raise ConfigError(
                        f"the checkpoint is of another model than {origin}: tensor {name} is {tuple(value.shape)} there, "
                        f"{tuple(tensor.shape)} here"
                    )
                tensor.copy_(value)


def buckets(named: NamedTensors, max_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """Cut a list of tensors into stretches of at most `max_bytes`; a larger one stands alone."""
    stretches: list[list[tuple[str, Tensor]]] = [[]]
    room = max_bytes
    for name, tensor in named:
        size = whole_shape(tensor).numel() * tensor.element_size()
        if size > room and stretches[-1]:
            stretches.append([])
            room = max_bytes
        stretches[-1].append((name, tensor))
        room -= size
    return [stretch for stretch in stretches if stretch]


def _whole(bucket: NamedTensors, modifier_rank: int | None = None) -> contextlib.AbstractContextManager[Any]:
    parameters = [parameter for _, parameter in bucket if is_partitioned(parameter)]
    if not parameters:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = import_deepspeed().zero.GatheredParameters(
        parameters, modifier_rank=modifier_rank
    )
    return context
