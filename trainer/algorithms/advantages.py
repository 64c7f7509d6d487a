"""Advantages of whole trajectories from their rewards. Pure, float64, no torch.

Groups are named by id, never inferred from positions, so uneven and interleaved groups are right.
A failed member has no reward: it stays out of its group's statistics and is masked.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from laminar.types import BoolArray
from trainer.algorithms.options import Standardization

Float64Array = npt.NDArray[np.float64]


def group_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[str],
    *,
    std: Standardization = "sample",
    std_epsilon: float = 1e-6,
    variance_tolerance: float = 1e-6,
) -> tuple[Float64Array, BoolArray]:
    """Rewards relative to their group: (reward - mean) / (std + epsilon), as in GRPO (arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: (N,) one a trajectory, in any order; None if it failed.
        group_ids: (N,) the group of each.
        std: divisor; see `GrpoOptions.std`.
        std_epsilon: added to the standard deviation.
        variance_tolerance: a group whose rewards differ by no more gets zeros.

    Returns:
        (N,) float64 advantages in the given order, and (N,) bool, false where the trajectory failed (advantage 0).
    """
    good = np.array([reward is not None for reward in rewards], np.bool_)
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    advantages = np.zeros(len(rewards), np.float64)
    places_of: dict[str, list[int]] = {}
    for place in np.flatnonzero(good).tolist():
        places_of.setdefault(group_ids[place], []).append(place)
    for places in places_of.values():
        advantages[places] = _relative(values[places], std, std_epsilon, variance_tolerance)
    return advantages, good


def is_informative(rewards: Sequence[float | None], variance_tolerance: float = 1e-6) -> bool:
    """Whether a group's rewards differ by more than the tolerance, failed members left out."""
    values = [reward for reward in rewards if reward is not None]
    return bool(values) and max(values) - min(values) > variance_tolerance


def _relative(values: Float64Array, std: Standardization, epsilon: float, tolerance: float) -> Float64Array:
    if not is_informative(values.tolist(), tolerance):
        return np.zeros_like(values)
    centred = values - values.mean()
    if std == "none":
        return centred
    return centred / (values.std(ddof=1 if std == "sample" else 0) + epsilon)
