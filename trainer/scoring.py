"""What is found out about a step's rows at batch start, before its first update: scores, corrections, advantages of tokens.

Each rank scores its own rows. What needs whole trajectories, or the whole batch, is added up over ranks, trajectories row by
row, so neither the split into micro-batches nor the number of ranks changes a number.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from laminar.config.trainer import CorrectionConfig
from laminar.types import Float32Array
from trainer.algorithms.advantages import Float64Array
from trainer.algorithms.base import Algorithm, RowScores
from trainer.algorithms.loss import loss_denominator
from trainer.correction import SequenceVerdicts, judge_sequences, row_sums, token_weights
from trainer.engine import TrainerEngine
from trainer.mismatch import Mismatch
from trainer.packing import PackedRows, Row, pack_rows, unpack_rows
from trainer.plan import MiniBatchPlan, StepPlan
from trainer.ranks import Ranks

WHITEN_EPSILON = 1e-8
"""Added to the standard deviation of a batch's advantages."""

Rows = dict[int, Row]
"""This rank's rows by their index in the plan."""
Scorer = Callable[[PackedRows], Tensor]


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """A step that is ready to be trained.

    Attributes:
        rows: with the scores `advantages` and, as asked for, `proximal_logprobs`, `ref_logprobs`, `weights`,
            `values` and `returns`.
        mini_batches: those with something left to train, and its denominators.
        mismatch: of the proximal log-probs; None if they were not needed.
        problem: why the step cannot be trained; None if it can.
    """

    rows: Rows
    mini_batches: tuple[MiniBatchPlan, ...]
    mismatch: Mismatch | None = None
    problem: str | None = None


def score_step(engine: TrainerEngine, algorithm: Algorithm, plan: StepPlan, rows: Rows, step: int) -> ScoredStep:
    """Score, correct, and give each token its advantage; all ranks call it together.

    Args:
        engine: its weights are those of version `step - 1`.
        algorithm: says what it needs.
        plan: the step's, of all ranks.
        rows: this rank's.
        step: number of the step.
    """
    correction, mini_batches, mismatch = engine.config.trainer.correction, plan.mini_batches, None
    names: list[str] = []
    if correction.is_on or "proximal_logprobs" in algorithm.needs:
        names.append("proximal_logprobs")
        rows = _score(engine, names[-1], engine.score, mini_batches, rows)
    if "ref_logprobs" in algorithm.needs:
        names.append("ref_logprobs")
        with engine.reference as reference:
            rows = _score(engine, names[-1], reference.score, mini_batches, rows)
    if engine.critic is not None:
        names.append("values")
        rows = _score(engine, names[-1], engine.critic.score, mini_batches, rows)
    problem = _first_undefined(engine.ranks, rows, names)
    if problem:
        return ScoredStep(rows, mini_batches, problem=problem)
    if "proximal_logprobs" in names:
        verdicts, sums_R3 = _judge(engine.ranks, plan, rows, correction)
        rows, mismatch = _correct(rows, verdicts, correction, trained_on=step - 1)
        if correction.masks_sequences:
            mini_batches = _recount(algorithm, plan, verdicts, sums_R3[:, 2])
            problem = None if mini_batches else "trainer.correction dropped every trajectory"
    rows = _spread_advantages(engine.ranks, algorithm, rows)
    problem = problem or _first_undefined(engine.ranks, rows, ["advantages"])
    return ScoredStep(rows, mini_batches, mismatch, problem)


def _score(engine: TrainerEngine, name: str, scorer: Scorer, mini_batches: tuple[MiniBatchPlan, ...], rows: Rows) -> Rows:
    scored: Rows = {}
    for mini_batch in mini_batches:
        for indices in mini_batch.ranks[engine.ranks.share]:
            own = [rows[index] for index in indices]
            batch = pack_rows(own, share_prompts=engine.layout.shares_prompts, device=engine.ranks.device)
            values_BT = scorer(batch)
            arrays = unpack_rows(values_BT, own, share_prompts=engine.layout.shares_prompts) if own else []
            scored |= {index: _with(row, name, array) for index, row, array in zip(indices, own, arrays, strict=True)}
    return scored


def _first_undefined(ranks: Ranks, rows: Rows, names: list[str]) -> str | None:
    """A sentence that names the trajectories whose scores are not finite at a trained place, the same on every rank."""
    if not names:
        return None
    bad = {
        f"{row.shape.name} got {name} that are not finite"
        for row in rows.values()
        for name in names
        if not np.isfinite(row.scores[name][row.mask]).all()
    }
    texts = dict.fromkeys(text for text in ranks.gather_texts(min(bad, default="")) if text)
    return f"trajectory {', trajectory '.join(texts)} at batch start" if texts else None


def _judge(ranks: Ranks, plan: StepPlan, rows: Rows, correction: CorrectionConfig) -> tuple[SequenceVerdicts, Float64Array]:
    """Verdicts on the trajectories of all rows, and all rows' sums."""
    own_R3 = np.zeros((len(plan.rows), 3))
    for index, row in rows.items():
        own_R3[index] = row_sums(_difference(row), row.mask)
    sums_R3 = np.array(ranks.sum_shares(own_R3.ravel().tolist())).reshape(own_R3.shape)
    return judge_sequences(sums_R3, [row.trajectory_id for row in plan.rows], correction), sums_R3


def _correct(
    rows: Rows, verdicts: SequenceVerdicts, correction: CorrectionConfig, *, trained_on: int
) -> tuple[Rows, Mismatch]:
    """Rows with weights, dropped ones without a trained token; and the mismatch of them all."""
    corrected: Rows = {}
    mismatch = Mismatch()
    for index, row in rows.items():
        difference_T, is_kept = _difference(row), bool(verdicts.kept[index])
        weights_T = token_weights(difference_T, row.mask, float(verdicts.log_weight[index]), correction)
        difference_N = difference_T[row.mask]
        applied_N = np.exp(difference_N) if correction.weight == "none" else weights_T[row.mask]
        mismatch.add(difference_N, trained_on - row.versions[row.mask], applied_N * is_kept if correction.is_on else None)
        weighted = row if correction.weight == "none" else _with(row, "weights", weights_T)
        corrected[index] = weighted if is_kept else replace(weighted, mask=np.zeros_like(row.mask))
    return corrected, mismatch


def _recount(
    algorithm: Algorithm, plan: StepPlan, verdicts: SequenceVerdicts, tokens_R: Float64Array
) -> tuple[MiniBatchPlan, ...]:
    """The mini-batches with something left to train, with denominators of that."""
    recounted = []
    for mini_batch in plan.mini_batches:
        kept = [index for batches in mini_batch.ranks for batch in batches for index in batch if verdicts.kept[index]]
        num_tokens = int(tokens_R[kept].sum())
        denominator = loss_denominator(
            algorithm.aggregation,
            num_tokens=num_tokens,
            num_sequences=len({plan.rows[index].trajectory_id for index in kept}),
            fixed_tokens=algorithm.fixed_tokens,
        )
        if num_tokens:
            recounted.append(MiniBatchPlan(denominator, num_tokens, mini_batch.ranks))
    return tuple(recounted)


def _spread_advantages(ranks: Ranks, algorithm: Algorithm, rows: Rows) -> Rows:
    """Rows with the advantage of each token, and with a critic the return that its value should have been."""
    tokens = {index: algorithm.token_advantages(row.advantage, _row_scores(row)) for index, row in rows.items()}
    if "values" in algorithm.needs:
        rows = {index: _with(row, "returns", tokens[index] + row.scores["values"]) for index, row in rows.items()}
    if algorithm.whiten:
        mean, std = _moments(ranks, [tokens[index][row.mask] for index, row in rows.items()])
        tokens = {index: (values - mean) / (std + WHITEN_EPSILON) for index, values in tokens.items()}
    return {index: _with(row, "advantages", tokens[index]) for index, row in rows.items()}


def _moments(ranks: Ranks, values: list[Float64Array]) -> tuple[float, float]:
    """Mean and population standard deviation over all ranks, in two passes, so that close values keep their difference."""
    total, count = ranks.sum_shares([sum(float(part.sum()) for part in values), float(sum(map(len, values)))])
    mean = total / max(count, 1)
    (squares,) = ranks.sum_shares([sum(float(np.square(part - mean).sum()) for part in values)])
    return mean, float(np.sqrt(squares / max(count, 1)))


def _row_scores(row: Row) -> RowScores:
    names = ("proximal_logprobs", "ref_logprobs", "values")
    return RowScores(row.mask, row.rollout_logprobs, **{name: row.scores.get(name) for name in names})


def _difference(row: Row) -> Float64Array:
    return row.scores["proximal_logprobs"].astype(np.float64) - row.rollout_logprobs


def _with(row: Row, name: str, array: Float32Array | Float64Array) -> Row:
    return replace(row, scores={**row.scores, name: array.astype(np.float32)})
