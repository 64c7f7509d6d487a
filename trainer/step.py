"""One training step, from trajectories to new weights; no Redis, no publishing.

Every rank runs it together. Rank 0 holds the groups, plans, and sends the plan; each rank fetches the rows that it is given.
What cannot be trained is skipped, never turned into a number: the report says why, and names the trajectory.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laminar.errors import ConfigError, InvariantError
from laminar.policies.masking import oldest_trained_number
from laminar.types import Trajectory
from trainer.algorithms.base import Algorithm
from trainer.algorithms.loss import loss_numerator, mismatch, non_finite_row
from trainer.batch_metrics import batch_metrics
from trainer.engine import TrainerEngine, Update
from trainer.packing import PackedRows, Row, pack_rows
from trainer.plan import MiniBatchPlan, StepPlan, build_rows, plan_step
from trainer.schedule import learning_rate

Groups = Sequence[tuple[Trajectory, ...]]
Fetch = Callable[[Sequence[str]], Groups]
"""Given group ids, the groups in that order; called on ranks other than 0."""

PROVIDED = frozenset({"rollout_logprobs"})
"""What the step can give an algorithm beside the current log-probs."""

_SUMS = ("loss", "ratio", "clip_low", "clip_high", "entropy", "kl", "logprob_abs_diff")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did.

    Attributes:
        step: its number.
        metrics: by name; the same on every rank, except times.
        trained_tokens: tokens that entered an applied update, all ranks together.
        skipped_reason: why the step, or the rest of it, was not applied; None if all is well.
    """

    step: int
    metrics: dict[str, float]
    trained_tokens: int
    skipped_reason: str | None


@dataclass(slots=True)
class _Totals:
    """Sums over the updates of a step so far."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    denominator: float = 0.0
    tokens: int = 0
    micro_batches: int = 0
    mismatch_tokens: int = 0
    grad_norms: list[float] = field(default_factory=list)
    forward_backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0


def train_step(
    engine: TrainerEngine,
    algorithm: Algorithm,
    groups: Groups | None,
    step: int,
    *,
    fetch: Fetch | None = None,
    oldest_trained: int | None = None,
) -> StepReport:
    """Train step number `step` on a batch; the weights before it are version `step - 1`.

    Args:
        engine: this rank's engine.
        algorithm: the same on all ranks.
        groups: complete groups; only rank 0's are read.
        step: from 1.
        fetch: how the other ranks get their groups; not needed with one rank.
        oldest_trained: tokens of versions below this number are not trained; None: by the config's bound. Only rank 0's is
            read.

    Raises:
        ConfigError: if a row exceeds the token budget (it names the trajectory), or the algorithm needs what there is not.
    """
    missing = algorithm.needs - PROVIDED
    if missing:
        raise ConfigError(f"trainer.algorithm needs {', '.join(sorted(missing))}, which this trainer does not provide")
    plan = StepPlan.decode(engine.ranks.decide(lambda: _plan(engine, algorithm, groups, step, oldest_trained).encode()))
    rows = _own_rows(engine, plan, groups, fetch)
    rate = learning_rate(engine.config.trainer, step, engine.config.run.max_steps)
    totals = _Totals()
    skipped_reason = plan.skipped
    for number, mini_batch in enumerate(plan.mini_batches, start=1):
        problem = _train_mini_batch(engine, algorithm, mini_batch, rows, rate, totals)
        if problem:
            skipped_reason = f"{problem}; {number - 1} of {len(plan.mini_batches)} updates were applied"
            break
    metrics = plan.metrics | _metrics(totals, rate)
    return StepReport(step, metrics, totals.tokens, skipped_reason)


def _plan(
    engine: TrainerEngine, algorithm: Algorithm, groups: Groups | None, step: int, oldest_trained: int | None
) -> StepPlan:
    if not groups:
        raise InvariantError(f"step {step}: rank 0 needs at least one group")
    trainer = engine.config.trainer
    if oldest_trained is None:
        oldest_trained = oldest_trained_number(step - 1, engine.config.staleness.bound)
    plan = plan_step(
        groups,
        algorithm,
        mini_batches=trainer.mini_batches,
        max_tokens=trainer.max_tokens_per_micro_batch,
        num_ranks=engine.ranks.world_size,
        share_prompts=engine.share_prompts,
        oldest_trained=oldest_trained,
    )
    plan.metrics.update(batch_metrics(groups, trained_on=step - 1, oldest_trained=oldest_trained))
    return plan


def _own_rows(engine: TrainerEngine, plan: StepPlan, groups: Groups | None, fetch: Fetch | None) -> dict[int, Row]:
    indices = sorted(plan.rows_of(engine.ranks.rank))
    plans = [plan.rows[index] for index in indices]
    if not plans:
        return {}
    if not engine.ranks.is_first:
        if fetch is None:
            raise InvariantError(f"rank {engine.ranks.rank} has no way to fetch its groups")
        groups = fetch(list(dict.fromkeys(row.group_id for row in plans)))
    trajectories = [trajectory for group in groups or () for trajectory in group]
    return dict(zip(indices, build_rows(plans, trajectories, plan.oldest_trained), strict=True))


def _train_mini_batch(
    engine: TrainerEngine, algorithm: Algorithm, plan: MiniBatchPlan, rows: dict[int, Row], rate: float, totals: _Totals
) -> str | None:
    """Forward, backward, update. Returns why the update was not applied, or None."""
    started = time.perf_counter()
    sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=engine.ranks.device)
    undefined = ""
    micro_batches = plan.ranks[engine.ranks.rank]
    totals.micro_batches += len(micro_batches)
    for number, indices in enumerate(micro_batches, start=1):
        batch = pack_rows([rows[index] for index in indices], share_prompts=engine.share_prompts, device=engine.ranks.device)
        logprobs_BT, entropy_BT = engine.forward(batch, is_last=number == len(micro_batches))
        numerator, parts = _loss(algorithm, batch, logprobs_BT, entropy_BT)
        loss = numerator / plan.denominator
        bad = non_finite_row(logprobs_BT.detach(), batch.mask)
        if bad is not None:
            undefined = undefined or batch.names[bad]
            loss = loss + logprobs_BT.sum() * math.nan  # spoils the gradient on every rank, so that no rank applies it
        engine.backward(loss)
        sums += parts
    reduced = engine.ranks.sum(sums.tolist())
    computed = time.perf_counter()
    update = engine.update(rate)
    totals.forward_backward_seconds += computed - started
    totals.optimizer_seconds += time.perf_counter() - computed
    if not update.applied:
        return _why(engine, update, undefined)
    _add(totals, plan, reduced, update)
    return None


def _loss(algorithm: Algorithm, batch: PackedRows, logprobs_BT: Tensor, entropy_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The micro-batch's loss numerator, with gradient, and its sums in the order of `_SUMS`, without."""
    policy = algorithm.policy_loss(logprobs_BT, batch.rollout_logprobs, batch.advantage, batch.mask)
    numerator = loss_numerator(policy.losses, batch.mask, algorithm.aggregation, batch.sequence_tokens)
    kl, difference = mismatch(logprobs_BT, batch.rollout_logprobs, batch.mask)
    parts = (
        numerator.detach(),
        policy.ratio.sum(),
        policy.clipped_low.sum(),
        policy.clipped_high.sum(),
        entropy_BT.sum(),
        kl,
        difference,
    )
    return numerator, torch.stack([part.double() for part in parts])


def _why(engine: TrainerEngine, update: Update, undefined: str) -> str:
    names = [name for name in engine.ranks.gather_texts(undefined) if name]
    if names:
        return f"trajectory {', '.join(names)} got a log-prob that is not finite from the trainer"
    return f"the gradient norm is {update.grad_norm}"


def _add(totals: _Totals, plan: MiniBatchPlan, reduced: list[float], update: Update) -> None:
    sums = dict(zip(_SUMS, reduced, strict=True))
    if totals.grad_norms:  # mismatch is measured on the weights at batch start, so on the first mini-batch
        sums["kl"] = sums["logprob_abs_diff"] = 0.0
    else:
        totals.mismatch_tokens = plan.num_tokens
    totals.sums = {name: totals.sums[name] + sums[name] for name in _SUMS}
    totals.denominator += plan.denominator
    totals.tokens += plan.num_tokens
    totals.grad_norms.append(update.grad_norm)


def _metrics(totals: _Totals, rate: float) -> dict[str, float]:
    metrics = {
        "train/learning_rate": rate,
        "train/tokens": float(totals.tokens),
        "train/micro_batches": float(totals.micro_batches),
        "time/forward_backward_seconds": totals.forward_backward_seconds,
        "time/optimizer_seconds": totals.optimizer_seconds,
    }
    if not totals.grad_norms:
        return metrics
    return metrics | {
        "train/loss": totals.sums["loss"] / totals.denominator,
        "train/policy_loss": totals.sums["loss"] / totals.denominator,
        "train/grad_norm": sum(totals.grad_norms) / len(totals.grad_norms),
        "train/ratio_mean": totals.sums["ratio"] / totals.tokens,
        "train/clip_low_ratio": totals.sums["clip_low"] / totals.tokens,
        "train/clip_high_ratio": totals.sums["clip_high"] / totals.tokens,
        "train/entropy": totals.sums["entropy"] / totals.tokens,
        "mismatch/kl": totals.sums["kl"] / totals.mismatch_tokens,
        "mismatch/logprob_abs_diff_mean": totals.sums["logprob_abs_diff"] / totals.mismatch_tokens,
    }
