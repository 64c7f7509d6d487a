"""What the step asks of an algorithm."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from laminar.types import Trajectory
from trainer.algorithms.loss import PolicyLoss
from trainer.algorithms.options import Aggregation


class Algorithm(Protocol):
    """An advantage estimator, a policy loss, and what they need.

    Attributes:
        needs: names of per-token inputs beside the current log-probs; the step provides `rollout_logprobs`.
    """

    needs: ClassVar[frozenset[str]]

    @property
    def aggregation(self) -> Aggregation:
        """How token losses become one number."""

    @property
    def fixed_tokens(self) -> int | None:
        """See `GrpoOptions.fixed_tokens`."""

    def keeps(self, group: Sequence[Trajectory]) -> bool:
        """Whether a complete group is worth training; asked before the batch is taken."""

    def trains(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory without failure enters the loss, above and below the line."""

    def advantages(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Advantage by trajectory id; failed trajectories are absent."""

    def policy_loss(
        self, logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor
    ) -> PolicyLoss:
        """Token losses of some rows, 0 where masked; `logprobs_BT` carries the gradient."""
