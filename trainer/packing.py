"""Rows as padded tensors. Lengths make the masks, never token ids, so a pad id that equals an end id does no harm.

Padding is on the right everywhere: under causal attention no real token then sees a pad, and no query is fully masked.

Shapes: B rows, T tokens, P distinct prompts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laminar.errors import InvariantError
from laminar.policies.masking import trained_mask
from laminar.types import BoolArray, Chain, Float32Array, Int32Array
from trainer.batches import RowShape


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A chain, ready to be trained; tokens after the last trained one are cut off.

    Attributes:
        shape: what planning knows of it; the arrays have `shape.num_tokens` elements.
        token_ids: (T,) int32.
        mask: (T,) bool, true where a token is trained.
        rollout_logprobs: (T,) float32; NaN at given tokens.
        versions: (T,) int32, number of the version that sampled a token; -1 at given tokens.
        temperature: the row was sampled at.
        advantage: of its trajectory.
        sequence_tokens: trained tokens of the whole trajectory, all its chains together.
        scores: (T,) float32 each, by name: what was found out at batch start (`trainer/scoring.py`).
    """

    shape: RowShape
    token_ids: Int32Array
    mask: BoolArray
    rollout_logprobs: Float32Array
    versions: Int32Array
    temperature: float
    advantage: float
    sequence_tokens: int
    scores: Mapping[str, Float32Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompts:
    """The distinct prompts of a micro-batch.

    Attributes:
        token_ids: (P, T) int64; 0 at padding.
        lengths: (P,) int64.
        of_row: (B,) int64, which prompt each row follows.
    """

    token_ids: Tensor
    lengths: Tensor
    of_row: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """A micro-batch. If prompts are shared, the row tensors begin after the prompt, else at the first token.

    Attributes:
        names: B trajectory ids.
        token_ids: (B, T) int64; 0 at padding.
        mask: (B, T) bool, true where a token is trained.
        rollout_logprobs: (B, T) float32; NaN at given tokens and padding.
        temperature: (B,) float32.
        advantage: (B,) float32.
        sequence_tokens: (B,) int64.
        scores: (B, T) float32 each, the rows' `scores`; NaN at padding.
        prompts: None if prompts are not shared.
    """

    names: tuple[str, ...]
    token_ids: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    temperature: Tensor
    advantage: Tensor
    sequence_tokens: Tensor
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    prompts: SharedPrompts | None = None

    def model_inputs(self) -> tuple[Tensor, ...]:
        """The arguments of `Policy.forward`."""
        shared = () if self.prompts is None else (self.prompts.token_ids, self.prompts.lengths, self.prompts.of_row)
        return (self.token_ids, self.mask, self.temperature, *shared)


def prompt_tokens(chain: Chain) -> int:
    """Length of the given segments that a chain begins with, in tokens."""
    count = 0
    for segment in chain.segments:
        if segment.is_sampled:
            break
        count += len(segment)
    return count


def make_row(
    chain: Chain,
    *,
    name: str,
    prompt: int,
    temperature: float,
    advantage: float,
    sequence_tokens: int,
    oldest_trained: int = 0,
) -> Row:
    """Prepare a chain with at least one trained token; tokens of versions below `oldest_trained` are not trained.

    Raises:
        InvariantError: if it begins with a sampled token, which nothing predicts, or if no token is trained.
    """
    mask = trained_mask(chain, oldest_trained)
    places = np.flatnonzero(mask)
    start = prompt_tokens(chain)
    if start == 0 or not len(places):
        raise InvariantError(f"trajectory {name}: a row needs a prompt of at least one token and a trained token")
    end = int(places[-1]) + 1
    return Row(
        shape=RowShape(name, prompt, start, end - start),
        token_ids=chain.token_ids()[:end],
        mask=mask[:end],
        rollout_logprobs=chain.rollout_logprobs()[:end],
        versions=chain.version_numbers()[:end],
        temperature=temperature,
        advantage=advantage,
        sequence_tokens=sequence_tokens,
    )


def pack_rows(rows: Sequence[Row], *, share_prompts: bool, device: torch.device) -> PackedRows:
    """Pad rows to one micro-batch; no rows give a micro-batch of one untrained row, which weighs 0.

    Args:
        rows: the rows.
        share_prompts: put each distinct prompt aside once.
        device: where the tensors go.
    """
    if not rows:
        return _nothing(device, share_prompts=share_prompts)
    starts = [row.shape.prompt_tokens if share_prompts else 0 for row in rows]

    def pad(arrays: Iterable[npt.NDArray], dtype: npt.DTypeLike, value: float) -> Tensor:
        return _pad([array[start:] for array, start in zip(arrays, starts, strict=True)], dtype, value, device)

    return PackedRows(
        names=tuple(row.shape.name for row in rows),
        token_ids=pad((row.token_ids for row in rows), np.int64, 0),
        mask=pad((row.mask for row in rows), np.bool_, False),
        rollout_logprobs=pad((row.rollout_logprobs for row in rows), np.float32, np.nan),
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
        advantage=torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device),
        sequence_tokens=torch.tensor([row.sequence_tokens for row in rows], device=device),
        scores={name: pad((row.scores[name] for row in rows), np.float32, np.nan) for name in rows[0].scores},
        prompts=_shared_prompts(rows, device) if share_prompts else None,
    )


def unpack_rows(values_BT: Tensor, rows: Sequence[Row], *, share_prompts: bool) -> list[Float32Array]:
    """Undo `pack_rows` for values of places: the rows' arrays, (T,) float32 each, NaN at a prompt that is shared."""
    arrays = []
    for values, row in zip(values_BT.detach().float().cpu().numpy(), rows, strict=True):
        start = row.shape.prompt_tokens if share_prompts else 0
        array = np.full(row.shape.num_tokens, np.nan, np.float32)
        array[start:] = values[: row.shape.num_tokens - start]
        arrays.append(array)
    return arrays


def _shared_prompts(rows: Sequence[Row], device: torch.device) -> SharedPrompts:
    prompts: dict[int, Int32Array] = {}
    for row in rows:
        prompts.setdefault(row.shape.prompt, row.token_ids[: row.shape.prompt_tokens])
    places = {prompt: place for place, prompt in enumerate(prompts)}
    return SharedPrompts(
        token_ids=_pad(list(prompts.values()), np.int64, 0, device),
        lengths=torch.tensor([len(token_ids) for token_ids in prompts.values()], device=device),
        of_row=torch.tensor([places[row.shape.prompt] for row in rows], device=device),
    )


def _pad(arrays: Sequence[npt.NDArray], dtype: npt.DTypeLike, value: float, device: torch.device) -> Tensor:
    padded = np.full((len(arrays), max(len(array) for array in arrays)), value, dtype)
    for place, array in enumerate(arrays):
        padded[place, : len(array)] = array
    return torch.from_numpy(padded).to(device)


def _nothing(device: torch.device, *, share_prompts: bool) -> PackedRows:
    none_P = torch.zeros(1, dtype=torch.int64, device=device)
    prompts = SharedPrompts(token_ids=none_P[:, None], lengths=none_P + 1, of_row=none_P) if share_prompts else None
    return PackedRows(
        names=("nothing",),
        token_ids=torch.zeros(1, 2, dtype=torch.int64, device=device),
        mask=torch.zeros(1, 2, dtype=torch.bool, device=device),
        rollout_logprobs=torch.full((1, 2), torch.nan, device=device),
        temperature=torch.ones(1, device=device),
        advantage=torch.zeros(1, device=device),
        sequence_tokens=torch.zeros(1, dtype=torch.int64, device=device),
        prompts=prompts,
    )
