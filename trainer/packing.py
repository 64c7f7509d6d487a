"""Rows as padded tensors. Lengths make the masks, never token ids, so a pad id that equals an end id does no harm.

Padding is on the right everywhere: under causal attention no real token then sees a pad, and no query is fully masked.

Shapes: B rows, T tokens, P distinct prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        temperature: the row was sampled at.
        advantage: of its trajectory.
        sequence_tokens: trained tokens of the whole trajectory, all its chains together.
    """

    shape: RowShape
    token_ids: Int32Array
    mask: BoolArray
    rollout_logprobs: Float32Array
    temperature: float
    advantage: float
    sequence_tokens: int


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
        prompts: None if prompts are not shared.
    """

    names: tuple[str, ...]
    token_ids: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    temperature: Tensor
    advantage: Tensor
    sequence_tokens: Tensor
    prompts: SharedPrompts | None = None


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
        return _nothing(device)
    starts = [row.shape.prompt_tokens if share_prompts else 0 for row in rows]
    return PackedRows(
        names=tuple(row.shape.name for row in rows),
        token_ids=_pad([row.token_ids[s:] for row, s in zip(rows, starts, strict=True)], np.int64, 0, device),
        mask=_pad([row.mask[s:] for row, s in zip(rows, starts, strict=True)], np.bool_, False, device),
        rollout_logprobs=_pad(
            [row.rollout_logprobs[s:] for row, s in zip(rows, starts, strict=True)], np.float32, np.nan, device
        ),
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
        advantage=torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device),
        sequence_tokens=torch.tensor([row.sequence_tokens for row in rows], device=device),
        prompts=_shared_prompts(rows, device) if share_prompts else None,
    )


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


def _nothing(device: torch.device) -> PackedRows:
    return PackedRows(
        names=("nothing",),
        token_ids=torch.zeros(1, 2, dtype=torch.int64, device=device),
        mask=torch.zeros(1, 2, dtype=torch.bool, device=device),
        rollout_logprobs=torch.full((1, 2), torch.nan, device=device),
        temperature=torch.ones(1, device=device),
        advantage=torch.zeros(1, device=device),
        sequence_tokens=torch.zeros(1, dtype=torch.int64, device=device),
    )
