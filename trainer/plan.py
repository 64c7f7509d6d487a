"""The plan of a step, made on rank 0 and sent to all: scalars by row, mini-batches, micro-batches by rank. Pure.

Invariants: the denominators count what all ranks will train, after all masks; a batch with an undefined number at a trained
place is skipped as a whole, naming the trajectory, before any work.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from laminar.errors import InvariantError
from laminar.policies.masking import trained_mask
from laminar.types import Purpose, Trajectory
from trainer.algorithms.base import Algorithm
from trainer.algorithms.loss import loss_denominator
from trainer.batches import Layout, plan_micro_batches, split_mini_batches
from trainer.packing import Row, make_row, prompt_tokens

MicroBatches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A chain of a trajectory, and its trajectory's numbers.

    Attributes:
        group_id: its group.
        trajectory_id: its trajectory.
        chain: index of the chain.
        prompt: rows with the same value share their prompt.
        advantage: of the trajectory.
        sequence_tokens: trained tokens of the trajectory, all chains together.
        row_tokens: all tokens of the chain.
    """

    group_id: str
    trajectory_id: str
    chain: int
    prompt: int
    advantage: float
    sequence_tokens: int
    row_tokens: int


@dataclass(frozen=True, slots=True)
class MiniBatchPlan:
    """One optimizer update.

    Attributes:
        denominator: divisor of the summed loss.
        num_tokens: trained tokens.
        ranks: micro-batches by rank, equally many each; a micro-batch is indices into the plan's rows.
    """

    denominator: float
    num_tokens: int
    ranks: tuple[MicroBatches, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What all ranks do in a step.

    Attributes:
        rows: all rows.
        mini_batches: optimizer updates.
        skipped: why it is nothing; None if it is something.
        oldest_trained: tokens of versions below this number are over age, and not trained.
        metrics: known before the work.
    """

    rows: tuple[RowPlan, ...] = ()
    mini_batches: tuple[MiniBatchPlan, ...] = ()
    skipped: str | None = None
    oldest_trained: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The plan as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "StepPlan":
        """Read what `encode` wrote."""
        return msgspec.json.decode(data, type=cls)

    def rows_of(self, rank: int) -> set[int]:
        """Indices of the rows that a rank computes."""
        return {index for mini_batch in self.mini_batches for batch in mini_batch.ranks[rank] for index in batch}


def plan_step(
    groups: Sequence[Sequence[Trajectory]],
    algorithm: Algorithm,
    *,
    mini_batches: int,
    max_tokens: int,
    num_ranks: int,
    layout: Layout,
    oldest_trained: int = 0,
) -> StepPlan:
    """Decide who computes what.

    Args:
        groups: the batch, at least one group.
        algorithm: gives the advantages, and says what enters the loss.
        mini_batches: optimizer updates wanted.
        max_tokens: budget of a micro-batch, padding included.
        num_ranks: ranks to deal to.
        layout: how the rows of a micro-batch lie.
        oldest_trained: tokens of versions below this number enter neither numerator nor denominator.

    Raises:
        ConfigError: if a row exceeds the budget; it names the trajectory.
    """
    advantages = algorithm.advantages(groups)
    row_plans: list[RowPlan] = []
    rows: list[Row] = []
    parts: list[MiniBatchPlan] = []
    for part in split_mini_batches(len(groups), mini_batches):
        start = len(rows)
        for group in (groups[index] for index in part):
            planned = list(_plan_group(group, algorithm, advantages, len(row_plans), oldest_trained))
            row_plans += planned
            rows += build_rows(planned, group, oldest_trained)
        if len(rows) == start:
            continue
        problem = first_undefined(rows[start:])
        if problem:
            return StepPlan(skipped=problem)
        shapes = [row.shape for row in rows[start:]]
        ranks = plan_micro_batches(shapes, max_tokens=max_tokens, num_ranks=num_ranks, layout=layout)
        num_tokens = sum(int(row.mask.sum()) for row in rows[start:])
        denominator = loss_denominator(
            algorithm.aggregation,
            num_tokens=num_tokens,
            num_sequences=len({shape.name for shape in shapes}),
            fixed_tokens=algorithm.fixed_tokens,
        )
        shifted = tuple(tuple(tuple(start + index for index in batch) for batch in batches) for batches in ranks)
        parts.append(MiniBatchPlan(denominator, num_tokens, shifted))
    return StepPlan(tuple(row_plans), tuple(parts), None if parts else "the batch has no token to train", oldest_trained)


def build_rows(plans: Iterable[RowPlan], trajectories: Iterable[Trajectory], oldest_trained: int) -> list[Row]:
    """The planned rows, in the plans' order; tokens of versions below `oldest_trained` are not trained.

    Raises:
        InvariantError: if a planned trajectory is missing.
    """
    by_id = {trajectory.trajectory_id: trajectory for trajectory in trajectories}
    rows = []
    for plan in plans:
        trajectory = by_id.get(plan.trajectory_id)
        if trajectory is None:
            raise InvariantError(f"trajectory {plan.trajectory_id} of group {plan.group_id} was planned but not fetched")
        rows.append(
            make_row(
                trajectory.chains[plan.chain],
                name=plan.trajectory_id,
                prompt=plan.prompt,
                temperature=trajectory.sampling.temperature,
                advantage=plan.advantage,
                sequence_tokens=plan.sequence_tokens,
                oldest_trained=oldest_trained,
            )
        )
    return rows


def first_undefined(rows: Iterable[Row]) -> str | None:
    """A sentence that names the first row with a NaN or infinite number at a trained place; None if there is none."""
    for row in rows:
        if not np.isfinite(row.advantage):
            return f"trajectory {row.shape.name} has advantage {row.advantage}"
        bad = np.flatnonzero(row.mask & ~np.isfinite(row.rollout_logprobs))
        if len(bad):
            return (
                f"trajectory {row.shape.name} has rollout log-prob {row.rollout_logprobs[bad[0]]} at trained token {bad[0]}"
            )
    return None


def _plan_group(
    group: Sequence[Trajectory],
    algorithm: Algorithm,
    advantages: Mapping[str, float],
    first_prompt: int,
    oldest_trained: int,
) -> Iterable[RowPlan]:
    prompts: dict[bytes, int] = {}
    for trajectory in group:
        if trajectory.failure is not None or trajectory.purpose != Purpose.TRAIN or not algorithm.trains(trajectory):
            continue
        trained = [int(trained_mask(chain, oldest_trained).sum()) for chain in trajectory.chains]
        for index, chain in enumerate(trajectory.chains):
            if trained[index]:
                prompt = chain.token_ids()[: prompt_tokens(chain)].tobytes()
                yield RowPlan(
                    group_id=trajectory.group_id,
                    trajectory_id=trajectory.trajectory_id,
                    chain=index,
                    prompt=prompts.setdefault(prompt, first_prompt + len(prompts)),
                    advantage=float(advantages[trajectory.trajectory_id]),  # a user's may be numpy's
                    sequence_tokens=sum(trained),
                    row_tokens=chain.num_tokens,
                )
