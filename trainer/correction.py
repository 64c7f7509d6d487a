"""Off-policy correction (`[trainer.correction]`): weights of tokens, and sequences that leave the loss. Pure, float64.

With d = log-prob at batch start - log-prob of the engine at a trained token, and w = exp(d):

| `weight` | multiplies a token's policy loss | source |
|---|---|---|
| `token_tis` | min(w, max) | truncated importance sampling (Ionides 2008; arXiv 1802.01561, rho) |
| `sequence_tis` | min(prod w, max), prod over the trajectory | the same of whole sequences |
| `token_mis` | w, or 0 above max | masked importance sampling |
| `sequence_mis` | prod w, or 0 above max | the same of whole sequences |
| `icepop` | w, or 0 outside [min, max] | IcePop (arXiv 2510.18855) |

The geometric mask drops trajectories whose geometric mean of w leaves a band; the K3 mask those whose mean of w - 1 - d, an
estimate of KL(engine || trainer) a token, is too large. A weight of 0 is a weight and leaves the denominator alone; a
dropped trajectory leaves it too.
Shapes: R rows of the whole batch, T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar.config.trainer import CorrectionConfig
from laminar.types import BoolArray
from trainer.algorithms.advantages import Float64Array

MAX_LOG_WEIGHT = 20.0
"""A weight beyond e^20 is as good as infinite; every bound lies far below."""


@dataclass(frozen=True, slots=True)
class SequenceVerdicts:
    """What was decided of each row's trajectory, (R,) each.

    Attributes:
        kept: false where the trajectory leaves the loss.
        log_weight: sum of d over the trajectory.
    """

    kept: BoolArray
    log_weight: Float64Array


def row_sums(difference_T: Float64Array, mask_T: BoolArray) -> tuple[float, float, float]:
    """A row's share of its sequence: sum of d, sum of w - 1 - d, number of trained tokens.

    Args:
        difference_T: d; undefined values may stand at masked places.
        mask_T: true where a token is trained.
    """
    difference_N = difference_T[mask_T]
    return float(difference_N.sum()), float(k3(difference_N).sum()), float(len(difference_N))


def judge_sequences(sums_R3: Float64Array, sequence_of_row: Sequence[str], config: CorrectionConfig) -> SequenceVerdicts:
    """Decide of whole trajectories, from the `row_sums` of all their rows.

    Args:
        sums_R3: the rows' sums, all ranks together.
        sequence_of_row: (R,) trajectory ids.
        config: the bounds, inclusive.
    """
    _, sequence_R = np.unique(np.asarray(sequence_of_row), return_inverse=True)
    totals_S3 = np.zeros((int(sequence_R.max(initial=-1)) + 1, 3))
    np.add.at(totals_S3, sequence_R, sums_R3)
    tokens_S = np.maximum(totals_S3[:, 2], 1)
    mean_S, k3_S = totals_S3[:, 0] / tokens_S, totals_S3[:, 1] / tokens_S
    kept_S = np.ones(len(totals_S3), np.bool_)
    if config.geometric_min is not None:
        kept_S &= mean_S >= np.log(config.geometric_min)
    if config.geometric_max is not None:
        kept_S &= mean_S <= np.log(config.geometric_max)
    if config.max_k3 is not None:
        kept_S &= k3_S <= config.max_k3
    return SequenceVerdicts(kept_S[sequence_R], totals_S3[sequence_R, 0])


def token_weights(
    difference_T: Float64Array, mask_T: BoolArray, log_weight: float, config: CorrectionConfig
) -> Float64Array:
    """What multiplies the policy loss of each token of a row, (T,); 1 at masked places.

    Args:
        difference_T: d; undefined values may stand at masked places.
        mask_T: true where a token is trained.
        log_weight: sum of d over the whole trajectory.
        config: kind and bounds.
    """
    weights_T = np.ones(len(mask_T))
    if config.weight == "none":
        return weights_T
    of_sequence = config.weight in ("sequence_tis", "sequence_mis")
    log_weights_N = np.full(int(mask_T.sum()), log_weight) if of_sequence else difference_T[mask_T]
    weights_N = np.exp(np.clip(log_weights_N, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))
    if config.weight in ("token_tis", "sequence_tis"):
        weights_N = np.minimum(weights_N, config.weight_max)
    else:
        lowest = config.weight_min if config.weight == "icepop" else 0.0
        weights_N = np.where((weights_N >= lowest) & (weights_N <= config.weight_max), weights_N, 0.0)
    weights_T[mask_T] = weights_N
    return weights_T


def k3(difference: Float64Array) -> Float64Array:
    """exp(d) - 1 - d: non-negative, and on the engine's tokens an unbiased estimate of KL(engine || trainer)."""
    return np.expm1(np.clip(difference, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)) - difference
