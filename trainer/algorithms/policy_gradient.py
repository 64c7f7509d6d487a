"""The policy-gradient algorithms: an advantage a trajectory, a loss a token. Which one it is, its options say.

The ratio is taken against `rollout_logprobs`, what the engine sampled with, unless `ratio_to` says otherwise: data of an
older version is then corrected by the ratio and bounded by the clip. `presets.py` has the known ones, each with its
paper.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from laminar.errors import InvariantError
from laminar.types import Purpose, Trajectory
from trainer.algorithms.advantages import (
    Float64Array,
    gae,
    greedy_advantages,
    group_advantages,
    is_informative,
    overlong_penalty,
    returns_to_go,
)
from trainer.algorithms.base import Algorithm, RowScores, TokenInputs
from trainer.algorithms.kl import kl_loss_tokens, kl_tokens
from trainer.algorithms.loss import PolicyLoss, clipped_policy_loss, select, value_loss, weighted_logprob_loss
from trainer.algorithms.options import PolicyGradientOptions

Values = TypeVar("Values")


class PolicyGradient(Algorithm):
    """Which groups to keep, an advantage a trajectory, a loss a token, and what they need."""

    Options = PolicyGradientOptions

    def __init__(self, options: PolicyGradientOptions) -> None:
        self.options = options
        self.aggregation = options.aggregation
        self.fixed_tokens = options.fixed_tokens
        self.whiten = options.whiten
        in_reward = bool(options.kl_coef) and options.kl_in == "reward"
        asked = {
            "rollout_logprobs": True,
            "proximal_logprobs": options.ratio_to == "proximal" or in_reward,
            "ref_logprobs": bool(options.kl_coef),
            "values": options.baseline == "critic",
            "entropy_gradient": bool(options.entropy_coef),
        }
        self.needs = frozenset(name for name, is_asked in asked.items() if is_asked)

    def keeps(self, group: Sequence[Trajectory]) -> bool:
        """Whether a complete group is worth training; asked before the batch is taken."""
        options = self.options
        if not self.can_teach(group):
            return False
        return not options.filter_zero_variance or is_informative([t.reward for t in group], options.variance_tolerance)

    def can_teach(self, group: Sequence[Trajectory]) -> bool:
        """Whether a group has an answer to train, and the greedy one if the others are compared with it."""
        has_baseline = self.options.baseline != "greedy" or any(is_greedy(t) and t.reward is not None for t in group)
        return has_baseline and any(t.failure is None and t.purpose is Purpose.TRAIN and self.trains(t) for t in group)

    def trains(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory without failure enters the loss, above and below the line."""
        return not (self.options.mask_truncated and trajectory.is_truncated)

    def advantages(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Advantage by trajectory id; failed trajectories are absent."""
        trajectories = [trajectory for group in groups for trajectory in group]
        rewards = [self.shaped_reward(trajectory) for trajectory in trajectories]
        group_ids = [trajectory.group_id for trajectory in trajectories]
        if self.options.baseline == "greedy":
            values, good = greedy_advantages(rewards, group_ids, [is_greedy(trajectory) for trajectory in trajectories])
        else:
            values, good = group_advantages(
                rewards,
                group_ids,
                baseline=self.options.baseline,
                std=self.options.std,
                std_epsilon=self.options.std_epsilon,
                variance_tolerance=self.options.variance_tolerance,
            )
        return {t.trajectory_id: float(value) for t, value, ok in zip(trajectories, values, good, strict=True) if ok}

    def token_advantages(self, advantage: float, scores: RowScores) -> Float64Array:
        """The trajectory's advantage at each token, less the KL of that and all later ones, if KL is in the reward.

        With a critic: GAE of these rewards, the trajectory's coming at the row's last trained token.
        """
        options, cost_T = self.options, self._kl_cost(scores)
        if options.baseline != "critic":
            return advantage - returns_to_go(cost_T, scores.mask)
        rewards_T, places = -cost_T, np.flatnonzero(scores.mask)
        rewards_T[places[-1:]] += advantage
        values_T = _given(scores.values).astype(np.float64)
        return gae(rewards_T, values_T, scores.mask, gamma=options.gamma, gae_lambda=options.gae_lambda)

    def value_loss(self, values: Tensor, values_at_start: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """The critic's token losses, clipped as the options say."""
        return value_loss(values, values_at_start, returns, mask, self.options.value_clip)

    def _kl_cost(self, scores: RowScores) -> Float64Array:
        """What each token of a row is charged for its distance from the reference, (T,)."""
        if not (self.options.kl_coef and self.options.kl_in == "reward"):
            return np.zeros(len(scores.mask))
        logprobs_T, ref_T = (
            torch.from_numpy(_given(values)).double() for values in (scores.proximal_logprobs, scores.ref_logprobs)
        )
        kl_T = kl_tokens(logprobs_T, ref_T, torch.from_numpy(scores.mask), self.options.kl_estimator).numpy()
        return self.options.kl_coef * kl_T

    def policy_loss(self, batch: TokenInputs) -> PolicyLoss:
        """Token losses of some rows, with KL and entropy as penalty."""
        options = self.options
        behaviour_BT = _given(batch.proximal_logprobs) if options.ratio_to == "proximal" else batch.rollout_logprobs
        surrogate = weighted_logprob_loss
        if options.surrogate == "clipped":
            surrogate = partial(clipped_policy_loss, dual_clip=options.dual_clip)
        loss = surrogate(
            batch.logprobs,
            behaviour_BT,
            batch.advantages,
            batch.mask,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            level=options.ratio_level,
        )
        penalty, kl = self._penalty(batch)
        return PolicyLoss(loss.losses, loss.ratio, loss.clipped_low, loss.clipped_high, penalty, kl)

    def _penalty(self, batch: TokenInputs) -> tuple[Tensor | None, Tensor | None]:
        options = self.options
        penalty = -options.entropy_coef * select(batch.entropy, batch.mask) if options.entropy_coef else None
        if not options.kl_coef:
            return penalty, None
        ref_logprobs = _given(batch.ref_logprobs)
        kl = kl_tokens(batch.logprobs.detach(), ref_logprobs, batch.mask, options.kl_estimator)
        if options.kl_in == "loss":
            term = options.kl_coef * kl_loss_tokens(
                batch.logprobs,
                ref_logprobs,
                batch.rollout_logprobs,
                batch.mask,
                estimator=options.kl_estimator,
                gradient=options.kl_gradient,
            )
            penalty = term if penalty is None else penalty + term
        return penalty, kl

    def shaped_reward(self, trajectory: Trajectory) -> float | None:
        """The reward that advantages are made of; None if the trajectory failed."""
        options = self.options
        if trajectory.reward is None:
            return None
        return trajectory.reward + overlong_penalty(
            trajectory.num_sampled_tokens,
            trajectory.sampling.max_new_tokens,
            options.overlong_buffer_tokens,
            options.overlong_penalty,
        )


def is_greedy(trajectory: Trajectory) -> bool:
    """Whether it was played to be compared with, not to be trained."""
    return trajectory.purpose is Purpose.GREEDY_BASELINE


def _given(values: Values | None) -> Values:
    if values is None:
        raise InvariantError("the step did not provide what the algorithm needs")
    return values
