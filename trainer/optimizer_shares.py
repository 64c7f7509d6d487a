"""The optimizer's state as pieces of named parameters, so that any number of ranks, at any ZeRO stage, can go on with it.

DeepSpeed keeps float32 weights and Adam's moments in flat tensors, of which each rank has a share. A `Fragment` says which
stretch of which parameter lies where in a flat tensor. A checkpoint holds each under `kind/start/parameter`, in a file for
each rank; a rank that loads takes what it needs from all files. Nothing is computed: bits stay as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn

from laminar.errors import ConfigError

WEIGHTS = "weights"
STEP = "step"
"""Adam's count of updates, the same for all parameters."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A stretch of a flattened parameter: elements from `start` on, `length` of them, at `offset` in a flat tensor."""

    name: str
    start: int
    length: int
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """The stretch in a tensor that lies like the flat one, 1-D, not a copy."""
        return flat.detach().view(-1)[self.offset : self.offset + self.length]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One tensor that Adam updates on this rank.

    Attributes:
        flat: the tensor: 1-D, or a whole parameter.
        fragments: what lies in it; the rest is padding.
        trained: for each fragment, the same elements of the parameter that the model computes with, 1-D, not copies.
    """

    flat: nn.Parameter
    fragments: tuple[Fragment, ...]
    trained: tuple[Tensor, ...]


def find_shares(named: Iterable[tuple[str, nn.Parameter]], optimizer: Any, rank: int, world_size: int) -> list[Share]:
    """This rank's flat tensors and what lies in them.

    Args:
        named: the module's parameters.
        optimizer: DeepSpeed's wrapper of Adam; None where every rank updates whole parameters.
        rank: this rank.
        world_size: number of ranks.
    """
    names = {id(parameter): name for name, parameter in named if parameter.requires_grad}
    if optimizer is None:
        own = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        return [Share(p, (Fragment(name, 0, p.numel(), 0),), (p.detach().view(-1),)) for name, p in own]
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3
        pairs = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        return [_share_of_slices(flat, group, names, rank) for flat, group in pairs]
    if hasattr(optimizer, "bf16_groups"):  # ZeRO 1 under bfloat16
        flats, groups = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
        offsets = [_offsets(group) for group in groups]
    else:  # ZeRO 1 and 2
        flats, groups = optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups
        offsets = optimizer.round_robin_bit16_offsets
    return [_share_of_row(*parts, names, rank) for parts in zip(flats, groups, offsets, strict=True)]


def _share_of_slices(flat: nn.Parameter, group: Sequence[Any], names: Mapping[int, str], rank: int) -> Share:
    """ZeRO 3: each rank has an equal slice of every parameter, padded; the slices stand one after another."""
    fragments, trained, offset = [], [], 0
    for parameter in group:
        width = parameter.partition_numel()
        length = max(0, min(width, parameter.ds_numel - rank * width))
        fragments.append(Fragment(names[id(parameter)], rank * width, length, offset))
        trained.append(parameter.ds_tensor.detach().view(-1)[:length])
        offset += width
    return Share(flat, tuple(fragments), tuple(trained))


def _share_of_row(
    flat: nn.Parameter, group: Sequence[nn.Parameter], offsets: Sequence[int], names: Mapping[int, str], rank: int
) -> Share:
    """ZeRO 1 and 2: the parameters stand in a row, of which each rank has an equal stretch."""
    fragments, trained = [], []
    first, last = rank * flat.numel(), (rank + 1) * flat.numel()
    for parameter, offset in zip(group, offsets, strict=True):
        start, end = max(first, offset), min(last, offset + parameter.numel())
        if start < end:
            fragments.append(Fragment(names[id(parameter)], start - offset, end - start, start - first))
            trained.append(parameter.detach().view(-1)[start - offset : end - offset])
    return Share(flat, tuple(fragments), tuple(trained))


def _offsets(group: Sequence[nn.Parameter]) -> list[int]:
    offsets, position = [], 0
    for parameter in group:
        offsets.append(position)
        position += parameter.numel()
    return offsets


def named_tensors(
    shares: Sequence[Share], states: Mapping[Tensor, Mapping[str, Tensor]], *, weights: bool
) -> dict[str, Tensor]:
    """This rank's state as a checkpoint names it.

    Args:
        shares: this rank's.
        states: Adam's state of each flat tensor; empty before the first update.
        weights: whether the flat tensors hold weights of their own, which then belong to the state.
    """
    tensors: dict[str, Tensor] = {}
    for share in shares:
        kinds: dict[str, Tensor] = {WEIGHTS: share.flat} if weights else {}
        kinds |= {kind: value for kind, value in states.get(share.flat, {}).items() if kind != STEP}
        for kind, flat in kinds.items():
            tensors |= {f"{kind}/{part.start}/{part.name}": part.of(flat) for part in share.fragments if part.length}
        if STEP in states.get(share.flat, {}):
            tensors[STEP] = states[share.flat][STEP]
    return tensors


class SavedShares:
    """The optimizer state in the files of a checkpoint; a context manager, reads nothing before it is asked.

    Args:
        files: those of all ranks that saved.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [safe_open(file, framework="pt") for file in files]
        self._places: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
        self._step: int | None = None
        for number, file in enumerate(self._files):
            for key in file.keys():  # noqa: SIM118
                if key == STEP:
                    self._step = number
                    continue
                kind, start, name = key.split("/", 2)
                self._places.setdefault((kind, name), []).append((int(start), number, key))

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        for file in self._files:
            file.__exit__(None, None, None)

    @property
    def step(self) -> Tensor | None:
        """Adam's count of updates; None if there was none."""
        return None if self._step is None else self._files[self._step].get_tensor(STEP)

    @property
    def kinds(self) -> frozenset[str]:
        """What was saved of each parameter, such as `exp_avg`."""
        return frozenset(kind for kind, _ in self._places)

    def read(self, kind: str, part: Fragment, target: Tensor) -> None:
        """Fill `target`, 1-D, with a stretch of a parameter's state.

        Raises:
            ConfigError: if the files do not hold all of it.
        """
        filled, end = 0, part.start + part.length
        for start, number, key in self._places.get((kind, part.name), []):
            piece = self._files[number].get_slice(key)
            first, last = max(start, part.start), min(start + piece.get_shape()[0], end)
            if first < last:
                target[first - part.start : last - part.start] = piece[first - start : last - start].to(target.device)
                filled += last - first
        if filled != part.length:
            raise ConfigError(
                f"the checkpoint's optimizer state lacks {part.length - filled} numbers of {kind} of {part.name}: it is of "
                "another model, or of other trained parameters"
            )


@torch.no_grad()
def restore(shares: Sequence[Share], states: dict[Tensor, Any], saved: SavedShares, *, weights: bool) -> None:
    """Fill this rank's state from a checkpoint; the model's own weights are loaded already.

    Args:
        shares: this rank's.
        states: Adam's state, to be replaced.
        saved: what the checkpoint holds.
        weights: whether the flat tensors hold weights of their own.

    Raises:
        ConfigError: if the checkpoint does not hold all that is needed.
    """
    moments = saved.kinds - {WEIGHTS}
    for share in shares:
        for part, trained in zip(share.fragments, share.trained, strict=True):
            if WEIGHTS in saved.kinds:
                saved.read(WEIGHTS, part, part.of(share.flat))
            elif weights:
                part.of(share.flat).copy_(trained)
        if saved.step is None:
            states.pop(share.flat, None)
            continue
        state = {kind: torch.zeros_like(share.flat, requires_grad=False) for kind in moments}
        for kind, flat in state.items():
            for part in share.fragments:
                saved.read(kind, part, part.of(flat))
        states[share.flat] = {STEP: saved.step.to(share.flat.device, copy=True), **state}
