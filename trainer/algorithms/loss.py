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
from trainer.algorithms.options import Aggregation, Level

MAX_LOG_RATIO = 20.0
"""A ratio beyond e^20 is as good as infinite, and exp would overflow float32 at e^88; the gradient is 0 beyond."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss before aggregation, each (B, T); everything is 0 or false at masked places.

    Attributes:
        losses: token losses; they carry the gradient. Corrections for off-policy data multiply them.
        ratio: probability ratio, detached.
        clipped_low: where the lower clip acted: took the gradient away, or raised the weight.
        clipped_high: where the upper clip did.
        penalty: what is added to the losses uncorrected (KL, entropy); None: nothing.
        kl: estimate of the KL divergence from the reference, detached; None without one.
    """

    losses: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    penalty: Tensor | None = None
    kl: Tensor | None = None


def select(values: Tensor, mask: Tensor) -> Tensor:
    """The values where the mask is true, 0 elsewhere, whatever stands there."""
    return torch.where(mask, values, 0)


def log_ratio(logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Log of the token probability ratio, (B, T); 0 at masked places, whatever stands there."""
    return select(logprobs_BT, mask_BT) - select(behaviour_logprobs_BT, mask_BT)


def policy_ratio(logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, mask_BT: Tensor, level: Level = "token") -> Tensor:
    """The probability ratio, (B, T): each token's, or at each token that of its row.

    A row's ratio is the geometric mean of its trained tokens' (GSPO, arXiv 2507.18071, equation 7). Rows are chains: a
    trajectory of several chains has a ratio for each.
    """
    difference_BT = log_ratio(logprobs_BT, behaviour_logprobs_BT, mask_BT)
    if level == "sequence":
        mean_B1 = difference_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        difference_BT = mean_B1.expand_as(difference_BT)
    return difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprobs_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    level: Level = "token",
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476, equation 10).

    loss = -min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most -dual_clip A (arXiv 1912.09729, equation 9).

    Args:
        logprobs_BT: current log-probs; they carry the gradient.
        behaviour_logprobs_BT: log-probs that the ratio is taken to.
        advantages_BT: advantages, (B, T) or (B, 1).
        mask_BT: bool, true where a token is trained.
        clip_low: room below 1.
        clip_high: room above 1.
        dual_clip: bound of the loss where the advantage is negative; None: none.
        level: whose ratio; see `policy_ratio`.
    """
    ratio_BT = policy_ratio(logprobs_BT, behaviour_logprobs_BT, mask_BT, level)
    advantages_BT = select(advantages_BT.expand_as(mask_BT), mask_BT)
    clipped_BT, cost_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high), -advantages_BT
    losses_BT = torch.maximum(cost_BT * ratio_BT, cost_BT * clipped_BT)
    if dual_clip is not None:
        bound_BT = torch.where(advantages_BT < 0, -dual_clip * advantages_BT, torch.inf)
        losses_BT = torch.minimum(losses_BT, bound_BT)
    ratio_BT = ratio_BT.detach()
    return PolicyLoss(
        losses=select(losses_BT, mask_BT),
        ratio=select(ratio_BT, mask_BT),
        clipped_low=mask_BT & (ratio_BT < 1 - clip_low) & (advantages_BT < 0),
        clipped_high=mask_BT & (ratio_BT > 1 + clip_high) & (advantages_BT > 0),
    )


def weighted_logprob_loss(
    logprobs_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    level: Level = "token",
) -> PolicyLoss:
    """REINFORCE with a clipped importance weight that passes no gradient (CISPO, arXiv 2506.13585, equations 4 and 5).

    loss = -sg(clip(r, 1 - low, 1 + high)) A log p: every token keeps its gradient. With low = 1 the weight is only truncated
    from above (AIPO, arXiv 2505.24034; V-trace's rho). Arguments as those of `clipped_policy_loss`.
    """
    ratio_BT = policy_ratio(logprobs_BT.detach(), behaviour_logprobs_BT, mask_BT, level)
    advantages_BT = select(advantages_BT.expand_as(mask_BT), mask_BT)
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(
        losses=select(-weight_BT * advantages_BT * select(logprobs_BT, mask_BT), mask_BT),
        ratio=select(ratio_BT, mask_BT),
        clipped_low=mask_BT & (ratio_BT < 1 - clip_low),
        clipped_high=mask_BT & (ratio_BT > 1 + clip_high),
    )


def value_loss(
    values_BT: Tensor, values_at_start_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, clip: float | None = None
) -> Tensor:
    """Half the squared error of a critic's values, (B, T); 0 at masked places.

    With a clip it is the larger of the errors of the value and of the value held within `clip` of where it was at batch
    start: a value that has moved so far towards its return gets no further gradient.

    Args:
        values_BT: current values; they carry the gradient.
        values_at_start_BT: those at batch start.
        returns_BT: what they should be.
        mask_BT: bool, true where a token is trained.
        clip: see `PolicyGradientOptions.value_clip`.
    """
    values_BT, returns_BT = select(values_BT, mask_BT), select(returns_BT, mask_BT)
    errors_BT = (values_BT - returns_BT).square()
    if clip is not None:
        start_BT = select(values_at_start_BT, mask_BT)
        held_BT = start_BT + (values_BT - start_BT).clamp(-clip, clip)
        errors_BT = torch.maximum(errors_BT, (held_BT - returns_BT).square())
    return errors_BT / 2


def loss_numerator(losses_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation, sequence_tokens_B: Tensor) -> Tensor:
    """These rows' part of the mini-batch loss, before division by `loss_denominator`; arguments as those of `row_losses`.

    Returns:
        A scalar; exactly 0, with zero gradient, if nothing is trained.
    """
    return row_losses(losses_BT, mask_BT, aggregation, sequence_tokens_B).sum()


def row_losses(losses_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation, sequence_tokens_B: Tensor) -> Tensor:
    """Each row's part of the mini-batch loss, (B,), before division by `loss_denominator`.

    Args:
        losses_BT: token losses.
        mask_BT: bool, true where a token is trained.
        aggregation: see `PolicyGradientOptions.aggregation`.
        sequence_tokens_B: trained tokens of the row's whole sequence; read by `sequence_mean` only.
    """
    sums_B = select(losses_BT, mask_BT).sum(dim=1)
    return sums_B / sequence_tokens_B.clamp(min=1) if aggregation == "sequence_mean" else sums_B


def loss_denominator(
    aggregation: Aggregation, *, num_tokens: int, num_sequences: int, fixed_tokens: int | None = None
) -> float:
    """The divisor of the whole mini-batch: all micro-batches, all ranks, after all masks.

    Args:
        aggregation: see `PolicyGradientOptions.aggregation`.
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


def non_finite_row(values_BT: Tensor, mask_BT: Tensor) -> int | None:
    """Index of the first row with a NaN or infinity at an unmasked place; None if there is none."""
    bad_B = (~torch.isfinite(values_BT) & mask_BT).any(dim=1)
    return int(bad_B.int().argmax()) if bool(bad_B.any()) else None
