"""One training step, from trajectories to new weights; no Redis, no publishing.

Every rank runs it together. Rank 0 holds the groups, plans, and sends the plan; each rank fetches the rows that it is given.
What cannot be trained is skipped, never turned into a number: the report says why, and names the trajectory.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar.errors import ConfigError, InvariantError
from laminar.policies.masking import oldest_trained_number
from laminar.types import Trajectory
from trainer.algorithms.base import NEEDS, Algorithm
from trainer.batch_metrics import batch_metrics
from trainer.engine import TrainerEngine
from trainer.mismatch import Mismatch
from trainer.plan import StepPlan, build_rows, plan_step
from trainer.schedule import learning_rate
from trainer.scoring import Rows, score_step
from trainer.updates import Totals, Work, train_epochs
from trainer.utilisation import device_memory

logger = logging.getLogger("laminar.trainer.step")

Groups = Sequence[tuple[Trajectory, ...]]
Fetch = Callable[[Sequence[str]], Groups]
"""Given group ids, the groups in that order; called on ranks other than 0."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did.

    Attributes:
        step: its number.
        metrics: by name; the same on every rank, except times.
        trained_tokens: tokens that entered an applied update, all ranks together; several epochs count once.
        skipped_reason: why the step, or the rest of it, was not applied; None if all is well.
        notices: what was applied but stands out.
    """

    step: int
    metrics: dict[str, float]
    trained_tokens: int
    skipped_reason: str | None
    notices: tuple[str, ...] = ()


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
        RunFailedError: an update stands out, and the run is to end then (`trainer.spikes.action`).
    """
    missing = algorithm.needs - NEEDS
    if missing:
        raise ConfigError(f"trainer.algorithm needs {', '.join(sorted(missing))}, which this trainer does not provide")
    plan = StepPlan.decode(engine.ranks.decide(lambda: _plan(engine, algorithm, groups, step, oldest_trained).encode()))
    rate = learning_rate(engine.config.trainer, step, engine.config.run.max_steps)
    totals, skipped_reason, mismatch = Totals(), plan.skipped, Mismatch()
    if skipped_reason is None:
        started = time.perf_counter()
        scored = score_step(engine, algorithm, plan, _own_rows(engine, plan, groups, fetch), step)
        totals.scoring_seconds = time.perf_counter() - started
        mismatch, skipped_reason = scored.mismatch or mismatch, scored.problem
        if skipped_reason is None:
            work = Work(engine, algorithm, scored.rows, step, rate, totals)
            skipped_reason = train_epochs(work, scored.mini_batches, None if scored.mismatch else mismatch)
    metrics = plan.metrics | mismatch.metrics(engine.ranks) | totals.metrics() | {"train/learning_rate": rate}
    metrics = _finite(metrics, step)
    metrics |= device_memory(engine.ranks.device)
    if skipped_reason is None and engine.peak_flops is not None:
        metrics["throughput/model_flops_utilisation"] = _utilisation(engine, plan, totals, engine.peak_flops)
    return StepReport(step, metrics, totals.trained_tokens, skipped_reason, tuple(totals.notices))


def _plan(
    engine: TrainerEngine, algorithm: Algorithm, groups: Groups | None, step: int, oldest_trained: int | None
) -> StepPlan:
    if not groups:
        raise InvariantError(f"step {step}: rank 0 needs at least one group")
    trainer = engine.config.trainer
    seen = algorithm.observe(groups)
    if oldest_trained is None:
        oldest_trained = oldest_trained_number(step - 1, engine.config.staleness.bound)
    plan = plan_step(
        groups,
        algorithm,
        mini_batches=trainer.mini_batches,
        max_tokens=trainer.max_tokens_per_micro_batch * trainer.sequence_parallel_size,
        num_ranks=engine.ranks.num_shares,
        layout=engine.layout,
        oldest_trained=oldest_trained,
    )
    metrics = batch_metrics(groups, trained_on=step - 1, oldest_trained=oldest_trained) | seen
    plan.metrics.update(_finite({name: float(value) for name, value in metrics.items()}, step))
    return plan


def _finite(metrics: dict[str, float], step: int) -> dict[str, float]:
    """The metrics that are numbers; JSON has no word for the others."""
    undefined = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    for name, value in undefined.items():
        logger.warning("step %s: %s is %s, and is left out of the metrics", step, name, value)
    return {name: value for name, value in metrics.items() if name not in undefined}


def _utilisation(engine: TrainerEngine, plan: StepPlan, totals: Totals, peak_flops: float) -> float:
    """Of all ranks' arithmetic while they trained; see `trainer.utilisation`."""
    flops = engine.shape.flops(row.row_tokens for row in plan.rows) * engine.config.trainer.epochs
    seconds = totals.forward_backward_seconds + totals.optimizer_seconds
    return flops / (peak_flops * engine.ranks.world_size * seconds)


def _own_rows(engine: TrainerEngine, plan: StepPlan, groups: Groups | None, fetch: Fetch | None) -> Rows:
    indices = sorted(plan.rows_of(engine.ranks.share))
    plans = [plan.rows[index] for index in indices]
    if not plans:
        return {}
    if not engine.ranks.is_first:
        if fetch is None:
            raise InvariantError(f"rank {engine.ranks.rank} has no way to fetch its groups")
        groups = fetch(list(dict.fromkeys(row.group_id for row in plans)))
    trajectories = [trajectory for group in groups or () for trajectory in group]
    return dict(zip(indices, build_rows(plans, trajectories, plan.oldest_trained), strict=True))
