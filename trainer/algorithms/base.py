"""What the step asks of an algorithm, and what it gives.

Shapes: B rows, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from laminar.types import BoolArray, Float32Array, Trajectory
from trainer.algorithms.advantages import Float64Array
from trainer.algorithms.loss import PolicyLoss, value_loss
from trainer.algorithms.options import Aggregation

NEEDS = frozenset({"rollout_logprobs", "proximal_logprobs", "ref_logprobs", "entropy_gradient", "values"})
"""What an algorithm can ask for beside the current log-probs."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """What the loss of some rows is made of, each (B, T); undefined values may stand at masked places.

    Attributes:
        logprobs: current log-probs, with gradient.
        mask: bool, true where a token is trained.
        advantages: of each token.
        rollout_logprobs: the engine's, at the sampling temperature.
        entropy: of the current distribution, in nats; with gradient if asked for.
        proximal_logprobs: at batch start; None unless asked for.
        ref_logprobs: the reference's; None unless asked for.
    """

    logprobs: Tensor
    mask: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    entropy: Tensor
    proximal_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowScores:
    """What is known of a row at batch start, each (T,); undefined values may stand at masked places.

    Attributes:
        mask: true where a token is trained.
        rollout_logprobs: the engine's.
        proximal_logprobs: None unless asked for.
        ref_logprobs: None unless asked for.
        values: the critic's, before each token; None unless asked for.
    """

    mask: BoolArray
    rollout_logprobs: Float32Array
    proximal_logprobs: Float32Array | None = None
    ref_logprobs: Float32Array | None = None
    values: Float32Array | None = None


class Algorithm(Protocol):
    """An advantage estimator, a policy loss, and what they need. Subclasses inherit what they do not say.

    Attributes:
        needs: of `NEEDS`, what the step must provide.
        aggregation: how token losses become one number.
        fixed_tokens: see `PolicyGradientOptions.fixed_tokens`.
        whiten: centre and scale the advantages of all trained tokens of the batch (population standard deviation).
    """

    needs: frozenset[str] = frozenset({"rollout_logprobs"})
    aggregation: Aggregation = "token_mean"
    fixed_tokens: int | None = None
    whiten: bool = False

    def observe(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Rank 0 shows a batch once, before it asks for advantages: here an algorithm may learn from it; answers metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """What `observe` has learnt, as JSON values; part of every checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` said; empty: from the beginning."""

    def keeps(self, group: Sequence[Trajectory]) -> bool:
        """Whether a complete group is worth training; asked before the batch is taken."""
        return True

    def trains(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory without failure enters the loss, above and below the line."""
        return True

    def advantages(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Advantage by trajectory id; failed trajectories are absent. Asked on rank 0."""
        ...

    def token_advantages(self, advantage: float, scores: RowScores) -> Float64Array:
        """Advantage of each token of a row, (T,), from its trajectory's, at batch start; read where the mask is true."""
        return np.full(len(scores.mask), advantage)

    def value_loss(self, values: Tensor, values_at_start: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """The critic's token losses, each (B, T), 0 where masked; `values` carries the gradient. Asked if it needs `values`.

        What a value should be, its return, is its token's advantage before whitening plus the value at batch start.
        """
        return value_loss(values, values_at_start, returns, mask)

    def policy_loss(self, batch: TokenInputs) -> PolicyLoss:
        """Token losses of some rows, 0 where masked; `batch.logprobs` carries the gradient."""
        ...
