"""Advantages from rewards: of whole trajectories, and of tokens. Pure, float64, no torch.

Groups are named by id, never inferred from positions, so uneven and interleaved groups are right.
A failed member has no reward: it stays out of its group's statistics and is masked.
Shapes: N trajectories, T tokens of a row.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from laminar.types import BoolArray
from trainer.algorithms.options import Baseline, Standardization

Float64Array = npt.NDArray[np.float64]


def group_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[str],
    *,
    baseline: Baseline = "group_mean",
    std: Standardization = "sample",
    std_epsilon: float = 1e-6,
    variance_tolerance: float = 1e-6,
) -> tuple[Float64Array, BoolArray]:
    """Rewards relative to their group.

    `group_mean`: (reward - mean) / (std + epsilon), as in GRPO (arXiv 2402.03300, section 4.1.2). `leave_one_out`: reward
    less the mean of the others (RLOO, arXiv 2402.14740, section 2.3), which is the centred reward times G / (G - 1).
    `critic`, `none`: the reward itself.

    Args:
        rewards: (N,) one a trajectory, in any order; None if it failed.
        group_ids: (N,) the group of each.
        baseline: see `PolicyGradientOptions.baseline`.
        std: divisor; see `PolicyGradientOptions.std`.
        std_epsilon: added to the standard deviation.
        variance_tolerance: a group whose rewards differ by no more gets zeros, if there is a baseline.

    Returns:
        (N,) float64 advantages in the given order, and (N,) bool, false where the trajectory failed (advantage 0).
    """
    good = np.array([reward is not None for reward in rewards], np.bool_)
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    if baseline in ("none", "critic"):
        return np.where(good, values, 0.0), good
    advantages = np.zeros(len(rewards), np.float64)
    places_of: dict[str, list[int]] = {}
    for place in np.flatnonzero(good).tolist():
        places_of.setdefault(group_ids[place], []).append(place)
    for places in places_of.values():
        relative = _relative(values[places], std, std_epsilon, variance_tolerance)
        advantages[places] = relative * len(places) / (len(places) - 1) if _is_left_out(baseline, places) else relative
    return advantages, good


def greedy_advantages(
    rewards: Sequence[float | None], group_ids: Sequence[str], is_greedy: Sequence[bool]
) -> tuple[Float64Array, BoolArray]:
    """Reward less that of the group's greedy answer (ReMax, arXiv 2310.10505, algorithm 1).

    Args:
        rewards: (N,) one a trajectory, in any order; None if it failed.
        group_ids: (N,) the group of each.
        is_greedy: (N,) true where a trajectory is its group's greedy answer.

    Returns:
        (N,) float64 advantages, 0 in a group whose greedy answer failed, and (N,) bool, true for those to train: neither
        failed nor greedy.
    """
    baselines = {
        group: reward
        for reward, group, greedy in zip(rewards, group_ids, is_greedy, strict=True)
        if greedy and reward is not None
    }
    good = np.array([r is not None and not greedy for r, greedy in zip(rewards, is_greedy, strict=True)], np.bool_)
    relative = [
        reward - baselines[group] if reward is not None and group in baselines else 0.0
        for reward, group in zip(rewards, group_ids, strict=True)
    ]
    return np.where(good, np.array(relative, np.float64), 0.0), good


def is_informative(rewards: Sequence[float | None], variance_tolerance: float = 1e-6) -> bool:
    """Whether a group's rewards differ by more than the tolerance, failed members left out."""
    values = [reward for reward in rewards if reward is not None]
    return bool(values) and max(values) - min(values) > variance_tolerance


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """What a length adds to the reward, 0 down to -penalty over the buffer (DAPO, arXiv 2503.14476, equation 13)."""
    if buffer_tokens == 0:
        return 0.0
    return -penalty * min(1.0, max(0.0, (num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens))


def returns_to_go(rewards_T: Float64Array, mask_T: BoolArray, gamma: float = 1.0) -> Float64Array:
    """Discounted sum of a row's rewards from each trained token on; 0 at all other places.

    Discount and sum run over trained tokens only and pass through the gaps between them (tool output), so given tokens
    change nothing, whatever stands at their places.

    Args:
        rewards_T: reward of each token.
        mask_T: true where a token is trained.
        gamma: discount of one trained token.
    """
    returns_T = np.zeros(len(rewards_T), np.float64)
    following = 0.0
    for place in np.flatnonzero(mask_T)[::-1].tolist():
        following = float(rewards_T[place]) + gamma * following
        returns_T[place] = following
    return returns_T


def gae(
    rewards_T: Float64Array, values_T: Float64Array, mask_T: BoolArray, *, gamma: float, gae_lambda: float
) -> Float64Array:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16) over a row's trained tokens; 0 at all other places.

    d_t = reward_t + gamma V_{t+1} - V_t and A_t = d_t + gamma lambda A_{t+1}, where t + 1 is the next *trained* token:
    given tokens between two of them change nothing. After the last one both are 0.

    Args:
        rewards_T: reward of each token.
        values_T: the critic's value before each token.
        mask_T: true where a token is trained.
        gamma: discount of one trained token.
        gae_lambda: lambda.
    """
    advantages_T = np.zeros(len(rewards_T), np.float64)
    advantage = next_value = 0.0
    for place in np.flatnonzero(mask_T)[::-1].tolist():
        value = float(values_T[place])
        advantage = float(rewards_T[place]) + gamma * next_value - value + gamma * gae_lambda * advantage
        advantages_T[place], next_value = advantage, value
    return advantages_T


def _relative(values: Float64Array, std: Standardization, epsilon: float, tolerance: float) -> Float64Array:
    if not is_informative(values.tolist(), tolerance):
        return np.zeros_like(values)
    centred = values - values.mean()
    if std == "none":
        return centred
    return centred / (values.std(ddof=1 if std == "sample" else 0) + epsilon)


def _is_left_out(baseline: Baseline, places: Sequence[int]) -> bool:
    return baseline == "leave_one_out" and len(places) > 1
