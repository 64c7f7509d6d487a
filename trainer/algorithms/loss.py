"""Token losses and their aggregation, as pure functions of tensors.

Invariants:
- a value at a masked place is replaced before any arithmetic and selected away afterwards, never multiplied by the mask
  (NaN x 0 is NaN); an undefined value at an unmasked place stays visible;
- an aggregate is a numerator over *these* rows and a denominator counted over the whole mini-batch, so no split changes it.

Shapes: B rows, T tokens. A sequence is a trajectory; its rows (chains) may lie in different micro-batches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.errors import InvariantError
from trainer.algorithms.options import Aggregation

MAX_LOG_RATIO = 20.0
"""A ratio beyond e^20 is as good as infinite, and exp would overflow float32 at e^88; the gradient is 0 beyond."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A clipped policy loss before aggregation, each (B, T); everything is 0 or false at masked places.

    Attributes:
        losses: token losses; they carry the gradient.
        ratio: probability ratio, detached.
        clipped_low: where the lower clip took the gradient away.
        clipped_high: where the upper clip did.
    """

    losses: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def log_ratio(logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Log of the token probability ratio, (B, T); 0 at masked places, whatever stands there."""
    return _select(logprobs_BT, mask_BT) - _select(behaviour_logprobs_BT, mask_BT)


def clipped_policy_loss(
    logprobs_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476, equation 10).

    Args:
        logprobs_BT: current log-probs; they carry the gradient.
        behaviour_logprobs_BT: log-probs of the distribution that the tokens came from.
        advantages_BT: advantages, (B, T) or (B, 1).
        mask_BT: bool, true where a token is trained.
        clip_low: room below 1.
        clip_high: room above 1.
    """
    difference_BT = log_ratio(logprobs_BT, behaviour_logprobs_BT, mask_BT)
    ratio_BT = difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages_BT = _select(advantages_BT.expand_as(mask_BT), mask_BT)
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    losses_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)
    ratio_BT = ratio_BT.detach()
    return PolicyLoss(
        losses=_select(losses_BT, mask_BT),
        ratio=_select(ratio_BT, mask_BT),
        clipped_low=mask_BT & (ratio_BT < 1 - clip_low) & (advantages_BT < 0),
        clipped_high=mask_BT & (ratio_BT > 1 + clip_high) & (advantages_BT > 0),
    )


def loss_numerator(losses_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation, sequence_tokens_B: Tensor) -> Tensor:
    """These rows' part of the mini-batch loss, before division by `loss_denominator`.

    Args:
        losses_BT: token losses.
        mask_BT: bool, true where a token is trained.
        aggregation: see `GrpoOptions.aggregation`.
        sequence_tokens_B: trained tokens of the row's whole sequence; read by `sequence_mean` only.

    Returns:
        A scalar; exactly 0, with zero gradient, if nothing is trained.
    """
    sums_B = _select(losses_BT, mask_BT).sum(dim=1)
    if aggregation == "sequence_mean":
        sums_B = sums_B / sequence_tokens_B.clamp(min=1)
    return sums_B.sum()


def loss_denominator(
    aggregation: Aggregation, *, num_tokens: int, num_sequences: int, fixed_tokens: int | None = None
) -> float:
    """The divisor of the whole mini-batch: all micro-batches, all ranks, after all masks.

    Args:
        aggregation: see `GrpoOptions.aggregation`.
        num_tokens: trained tokens.
        num_sequences: sequences with at least one trained token.
        fixed_tokens: tokens a sequence counts for under `fixed_denominator`.

    Returns:
        At least 1, so that an empty mini-batch gives 0 and not NaN.
    """
    if aggregation == "token_mean":
        return max(num_tokens, 1)
    if aggregation != "fixed_denominator":
        return max(num_sequences, 1)
    if fixed_tokens is None:
        raise InvariantError("aggregation fixed_denominator without fixed_tokens")
    return max(num_sequences, 1) * fixed_tokens


def exclude_rows(mask_BT: Tensor, excluded_B: Tensor) -> Tensor:
    """The mask without the given rows (truncated ones, for instance)."""
    return mask_BT & ~excluded_B[:, None]


def non_finite_row(values_BT: Tensor, mask_BT: Tensor) -> int | None:
    """Index of the first row with a NaN or infinity at an unmasked place; None if there is none."""
    bad_B = (~torch.isfinite(values_BT) & mask_BT).any(dim=1)
    return int(bad_B.int().argmax()) if bool(bad_B.any()) else None


def mismatch(logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """How far the trainer's log-probs are from the engine's for the same tokens.

    Returns:
        Sums over the unmasked places, with d = trainer - rollout: of exp(d) - 1 - d, a non-negative and unbiased estimate of
        KL(rollout || trainer) on the engine's own tokens ("k3"), and of |d|.
    """
    difference_BT = log_ratio(logprobs_BT.detach(), rollout_logprobs_BT, mask_BT)
    kl_BT = difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() - difference_BT
    return kl_BT.sum(), difference_BT.abs().sum()


def _select(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros_like(values))
