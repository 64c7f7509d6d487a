"""GRPO: advantages relative to the group, the clipped policy loss against the rollout log-probs.

The ratio is taken against `rollout_logprobs`, what the engine sampled with, so data of an older version is corrected by the
ratio and bounded by the clip. There is no KL or entropy term.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from laminar.types import Trajectory
from trainer.algorithms.advantages import group_advantages, is_informative
from trainer.algorithms.loss import PolicyLoss, clipped_policy_loss
from trainer.algorithms.options import GrpoOptions


class Grpo:
    """An algorithm: which groups to keep, an advantage a trajectory, a loss a token, and what it needs."""

    Options = GrpoOptions
    needs: ClassVar[frozenset[str]] = frozenset({"rollout_logprobs"})

    def __init__(self, options: GrpoOptions) -> None:
        self.options = options
        self.aggregation = options.aggregation
        self.fixed_tokens = options.fixed_tokens

    def keeps(self, group: Sequence[Trajectory]) -> bool:
        """Whether a complete group is worth training; asked before the batch is taken."""
        rewards = [trajectory.reward for trajectory in group]
        return not self.options.filter_zero_variance or is_informative(rewards, self.options.variance_tolerance)

    def trains(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory without failure enters the loss, above and below the line."""
        return not (self.options.mask_truncated and trajectory.is_truncated)

    def advantages(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Advantage by trajectory id; failed trajectories are absent."""
        trajectories = [trajectory for group in groups for trajectory in group]
        values, good = group_advantages(
            [trajectory.reward for trajectory in trajectories],
            [trajectory.group_id for trajectory in trajectories],
            std=self.options.std,
            std_epsilon=self.options.std_epsilon,
            variance_tolerance=self.options.variance_tolerance,
        )
        return {t.trajectory_id: float(value) for t, value, ok in zip(trajectories, values, good, strict=True) if ok}

    def policy_loss(
        self, logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor
    ) -> PolicyLoss:
        """Token losses of some rows; see `clipped_policy_loss`."""
        return clipped_policy_loss(
            logprobs_BT,
            rollout_logprobs_BT,
            advantages_B[:, None],
            mask_BT,
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
        )
