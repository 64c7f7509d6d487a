"""Drawing the next token: counter-based noise and the inverse of the cumulative distribution.

Invariants: the noise of a token depends on its seed and its absolute place in the sequence alone (not on the batch, the
replica or a move); a log-prob is that of the tempered distribution *before* `top_k` and `top_p` cut it, so the trainer can
mirror it; temperature 0 takes the most probable token and reports its log-prob at temperature 1.
Shapes: B rows, V vocabulary. This module does not know models or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from laminar.errors import EngineError

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
DRAW_ROWS = 8
"""Rows drawn at once: few, so that their work space stays in the processor's cache."""


@dataclass(frozen=True, slots=True)
class DrawRow:
    """How one row is drawn; `position` is the absolute place of the token to come."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    position: int


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scatters every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """(B,) float64 in [0, 1): one number for each (seed, position), the same on every machine."""
    stream = mix(np.asarray(seeds, np.uint64) + GOLDEN)
    words = mix(stream + (np.asarray(positions, np.uint64) + np.uint64(1)) * GOLDEN)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits: torch.Tensor, rows: Sequence[DrawRow]) -> tuple[list[int], list[float]]:
    """Draw one token a row.

    Args:
        logits: (B, V) float32; overwritten.
        rows: B descriptions.

    Returns:
        B token ids and B log-probs at the sampling temperature.

    Raises:
        EngineError: if logits are not finite, which means broken weights.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    for start in range(0, len(rows), DRAW_ROWS):
        part = slice(start, start + DRAW_ROWS)
        part_ids, part_logprobs = draw_part(logits[part], rows[part])
        ids += part_ids
        logprobs += part_logprobs
    return ids, logprobs


def draw_part(logits: torch.Tensor, rows: Sequence[DrawRow]) -> tuple[list[int], list[float]]:
    """`draw` for few rows."""
    temperatures = [row.temperature or 1.0 for row in rows]
    if any(temperature != 1 for temperature in temperatures):
        logits.div_(torch.tensor(temperatures, dtype=torch.float32)[:, None])
    highest = logits.amax(dim=-1, keepdim=True)
    weights = logits.sub(highest).exp_()
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1].clone()
    if not bool(torch.isfinite(total).all()):
        raise EngineError("logits are not finite: the weights are broken; load another version")
    for index, row in enumerate(rows):
        if row.top_k != -1 or row.top_p < 1:
            truncate(weights[index], row.top_k, row.top_p)
            cumulative[index] = weights[index].cumsum(dim=-1, dtype=torch.float64)
    noise = torch.from_numpy(uniform([row.seed for row in rows], [row.position for row in rows]))[:, None]
    # right=True: the first token whose cumulative weight exceeds the target, so never one of weight 0
    chosen = torch.searchsorted(cumulative, noise * cumulative[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    for index, row in enumerate(rows):
        if row.temperature == 0:
            chosen[index, 0] = logits[index].argmax()
    logprobs = (logits.gather(-1, chosen) - highest)[:, 0].double() - total.log()
    return chosen[:, 0].tolist(), logprobs.float().tolist()


def truncate(weights: torch.Tensor, top_k: int, top_p: float) -> None:
    """Zero, in place, what lies outside the `top_k` largest of (V,) or the smallest set holding `top_p` of the mass."""
    width = weights.shape[-1] if top_k == -1 else min(top_k, weights.shape[-1])
    if width < weights.shape[-1]:
        values, indices = weights.topk(width)
    else:
        values, indices = weights.sort(descending=True, stable=True)
    before = values.cumsum(0, dtype=torch.float64) - values
    kept = before < top_p * values.sum(dtype=torch.float64)
    weights.zero_()
    weights[indices[kept]] = values[kept]
