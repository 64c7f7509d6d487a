"""Safe RLHF: the policy gradient of reward less multiplied cost, and the multiplier that keeps the mean cost at its limit.

See `SafeRlhfOptions` for formula and paper. Invariant: the multiplier moves once a batch, before the batch's advantages, and
is part of every checkpoint, so a replayed step sees the one that it saw.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from laminar.errors import ConfigError
from laminar.types import Trajectory
from trainer.algorithms.advantages import is_informative
from trainer.algorithms.policy_gradient import PolicyGradient, is_greedy
from trainer.algorithms.presets import SafeRlhfOptions

MIN_MULTIPLIER = 1e-3
"""The multiplier is the pace of its own ascent: from much less it would never come back, and 0 has no logarithm."""


class SafeRlhf(PolicyGradient):
    """A policy gradient with a Lagrange multiplier."""

    Options = SafeRlhfOptions

    def __init__(self, options: SafeRlhfOptions) -> None:
        super().__init__(options)
        self.safety = options
        self.multiplier = options.multiplier

    def observe(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Move the multiplier by the mean cost of what the batch trains: a greedy answer is not the policy's."""
        good = [trajectory for group in groups for trajectory in group if trajectory.failure is None]
        costs = [self.cost(trajectory) for trajectory in good if not is_greedy(trajectory)]
        mean = sum(costs) / max(len(costs), 1)
        self.multiplier = next_multiplier(self.multiplier, mean, self.safety) if costs else self.multiplier
        return {"reward/cost_mean": mean, "train/lagrange_multiplier": self.multiplier}

    def state(self) -> dict[str, Any]:
        """The multiplier."""
        return {"multiplier": self.multiplier}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with a checkpoint's multiplier."""
        self.multiplier = max(state.get("multiplier", self.safety.multiplier), least_multiplier(self.safety))

    def keeps(self, group: Sequence[Trajectory]) -> bool:
        """Whether a group's rewards or its costs differ, and there is an answer to train."""
        if not self.can_teach(group):
            return False
        good = [trajectory for trajectory in group if trajectory.failure is None]
        tolerance = self.safety.variance_tolerance
        return super().keeps(group) or is_informative([self.cost(trajectory) for trajectory in good], tolerance)

    def shaped_reward(self, trajectory: Trajectory) -> float | None:
        """(R - l C) / (1 + l), bounded however large the multiplier gets; None if the trajectory failed."""
        reward = super().shaped_reward(trajectory)
        return None if reward is None else (reward - self.multiplier * self.cost(trajectory)) / (1 + self.multiplier)

    def cost(self, trajectory: Trajectory) -> float:
        """What a trajectory cost.

        Raises:
            ConfigError: no reward term has the cost's name.
        """
        if self.safety.cost not in trajectory.reward_terms:
            known = ", ".join(trajectory.reward_terms) or "none"
            raise ConfigError(f"trainer.algorithm.options.cost is {self.safety.cost!r}, but the reward terms are: {known}")
        return trajectory.reward_terms[self.safety.cost]


def next_multiplier(multiplier: float, mean_cost: float, options: SafeRlhfOptions) -> float:
    """The multiplier after a batch: gradient ascent on its logarithm (arXiv 2310.12773, equation 31), within limits."""
    moved = math.log(multiplier) + options.multiplier_learning_rate * multiplier * (mean_cost - options.cost_limit)
    return math.exp(min(max(moved, math.log(least_multiplier(options))), math.log(options.max_multiplier)))


def least_multiplier(options: SafeRlhfOptions) -> float:
    """How far it may fall; not below what it begins as, if that is less."""
    return min(MIN_MULTIPLIER, options.multiplier, options.max_multiplier)
