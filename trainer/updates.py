"""The optimizer updates of a step: for each mini-batch, forward and backward over its micro-batches, then one update.

An update with an undefined number at a trained place is applied on no rank; its trajectory is named, the rest is left out.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from laminar.errors import RunFailedError
from laminar.types import Int32Array
from trainer.algorithms.base import Algorithm, TokenInputs
from trainer.algorithms.kl import kl_tokens
from trainer.algorithms.loss import loss_numerator, non_finite_row, row_losses, select
from trainer.critic import Critic
from trainer.engine import TrainerEngine
from trainer.mismatch import Mismatch
from trainer.packing import PackedRows, pack_rows
from trainer.plan import MiniBatchPlan
from trainer.ranks import Ranks
from trainer.scoring import Rows
from trainer.spikes import GRADIENT, Spike
from trainer.trained_module import Update

_SUMS = ("loss", "policy_loss", "ratio", "clip_low", "clip_high", "entropy", "kl", "rollout_kl")
Weighed = tuple[Tensor, Sequence[str]]
"""(B,) what the absolute token losses of a micro-batch's rows would make of the loss, and their trajectories' ids."""
Measured = tuple[Tensor, Sequence[Int32Array]]
"""(N,) log-probs less the engine's at a micro-batch's trained places, and the versions there, row by row."""
REFUSE = -1.0
"""A largest norm that no gradient has."""


@dataclass(slots=True)
class Totals:
    """Sums over the updates of a step so far; `seen_tokens` counts every epoch."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    denominator: float = 0.0
    trained_tokens: int = 0
    seen_tokens: int = 0
    micro_batches: int = 0
    grad_norms: list[float] = field(default_factory=list)
    critic_grad_norms: list[float] = field(default_factory=list)
    value_loss: float = 0.0
    forward_backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    scoring_seconds: float = 0.0
    notices: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """What is known of a step's updates."""
        metrics = {
            "train/tokens": float(self.trained_tokens),
            "train/micro_batches": float(self.micro_batches),
            "time/scoring_seconds": self.scoring_seconds,
            "time/forward_backward_seconds": self.forward_backward_seconds,
            "time/optimizer_seconds": self.optimizer_seconds,
        }
        if not self.grad_norms:
            return metrics
        if self.critic_grad_norms:
            metrics["train/critic_grad_norm"] = sum(self.critic_grad_norms) / len(self.critic_grad_norms)
            metrics["train/value_loss"] = self.value_loss / self.seen_tokens
        return metrics | {
            "train/loss": self.sums["loss"] / self.denominator,
            "train/policy_loss": self.sums["policy_loss"] / self.denominator,
            "train/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            "train/ratio_mean": self.sums["ratio"] / self.seen_tokens,
            "train/clip_low_ratio": self.sums["clip_low"] / self.seen_tokens,
            "train/clip_high_ratio": self.sums["clip_high"] / self.seen_tokens,
            "train/entropy": self.sums["entropy"] / self.seen_tokens,
            "train/kl": self.sums["kl"] / self.seen_tokens,
            "train/rollout_kl": self.sums["rollout_kl"] / self.seen_tokens,
        }


@dataclass(frozen=True, slots=True)
class Work:
    """What the updates of a step share."""

    engine: TrainerEngine
    algorithm: Algorithm
    rows: Rows
    step: int
    rate: float
    totals: Totals


def train_epochs(work: Work, mini_batches: Sequence[MiniBatchPlan], mismatch: Mismatch | None) -> str | None:
    """Every mini-batch, `trainer.epochs` times. Returns why the rest was left out, or None.

    The first update still sees the weights of the batch start: with a `mismatch`, it is measured there.
    """
    updates = list(mini_batches) * work.engine.config.trainer.epochs
    for number, mini_batch in enumerate(updates):
        problem = _train_mini_batch(work, mini_batch, mismatch if number == 0 else None)
        applied = len(work.totals.grad_norms)
        if number < min(applied, len(mini_batches)):
            work.totals.trained_tokens += mini_batch.num_tokens
        if problem:
            return f"{problem}; {applied} of {len(updates)} updates were applied"
    return None


def _train_mini_batch(work: Work, plan: MiniBatchPlan, mismatch: Mismatch | None) -> str | None:
    """Forward, backward, update. Returns why the update was not applied, or None."""
    engine, totals, started = work.engine, work.totals, time.perf_counter()
    sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=engine.ranks.device)
    undefined, value_loss_sum, weighed, measured = "", 0.0, list[Weighed](), list[Measured]()
    micro_batches = plan.ranks[engine.ranks.share]
    totals.micro_batches += len(micro_batches)
    for number, indices in enumerate(micro_batches, start=1):
        own = [work.rows[index] for index in indices]
        batch = pack_rows(own, share_prompts=engine.layout.shares_prompts, device=engine.ranks.device)
        is_last, needs_gradient = number == len(micro_batches), "entropy_gradient" in work.algorithm.needs
        logprobs_BT, entropy_BT = engine.forward(batch, is_last=is_last, entropy_gradient=needs_gradient)
        numerator, parts, problem, sizes_B = _loss(work.algorithm, batch, logprobs_BT, entropy_BT)
        weighed.append((sizes_B, batch.names))
        loss = numerator / plan.denominator
        if problem:
            undefined = undefined or problem
            loss = loss + logprobs_BT.sum() * math.nan  # spoils the gradient on every rank, so that no rank applies it
        elif mismatch is not None and own:
            difference_N = logprobs_BT.detach()[batch.mask] - batch.rollout_logprobs[batch.mask]
            measured.append((difference_N, [row.versions[row.mask] for row in own]))
        engine.backward(loss)
        sums += parts
        if engine.critic is not None:
            spoilt = math.nan if problem else 1.0  # a skipped update leaves the critic as it was, too
            weight = spoilt / plan.num_tokens
            value_loss, problem = _teach_critic(engine.critic, work.algorithm, batch, weight, is_last=is_last)
            value_loss_sum += value_loss
            undefined = undefined or problem
    if mismatch is not None and measured:
        _measure(mismatch, measured, trained_on=work.step - 1)
    *reduced, value_loss_sum = engine.ranks.sum_shares([*sums.tolist(), value_loss_sum])
    computed = time.perf_counter()
    figures = {"loss": abs(reduced[0]) / plan.denominator, "KL": reduced[_SUMS.index("rollout_kl")] / plan.num_tokens}
    if engine.critic is not None and not engine.critic.has_finite_gradient():
        undefined = undefined or "the critic's gradient is not finite"
    has_broken_critic = not math.isfinite(value_loss_sum) or _has_broken_gradient(engine)
    is_defined = all(map(math.isfinite, figures.values())) and not has_broken_critic  # else another net's
    spike = engine.spikes.find(figures) if is_defined else None
    update, spike = _update_unless_spike(work, spike, refuse=has_broken_critic)
    critic_update = None
    if engine.critic is not None:
        critic_update = engine.critic.update(work.rate, math.inf if update.applied else REFUSE)
    engine.spikes.add(figures | {GRADIENT: update.grad_norm})
    totals.forward_backward_seconds += computed - started
    totals.optimizer_seconds += time.perf_counter() - computed
    told = "" if spike is None else _tell(engine, spike, weighed)
    if not update.applied:
        return told or _why(engine, update, undefined)
    totals.notices += [told] if told else []
    _add(totals, plan, reduced, update)
    if critic_update is not None:
        totals.value_loss += value_loss_sum
        totals.critic_grad_norms.append(critic_update.grad_norm)
        if not critic_update.applied:
            return f"the critic's gradient norm is {critic_update.grad_norm}, so only the policy had the last update"
    return None


def _has_broken_gradient(engine: TrainerEngine) -> bool:
    """Whether the critic's gradient is not finite on any rank; all call it together."""
    return engine.critic is not None and engine.ranks.sum([not engine.critic.has_finite_gradient()])[0] > 0


def _update_unless_spike(work: Work, spike: Spike | None, *, refuse: bool) -> tuple[Update, Spike | None]:
    """Apply the gradient, unless that is to be left out; the spike, that of the gradient's norm if there is no other.

    A norm that is not finite is no spike but an undefined number: another net's, whatever else stands out.
    """
    engine = work.engine
    leaves_out = engine.config.trainer.spikes.action in ("skip", "stop")
    limit = engine.spikes.limit(GRADIENT) if leaves_out else math.inf
    update = engine.update(work.rate, REFUSE if refuse or (spike and leaves_out) else limit)
    if not math.isfinite(update.grad_norm):
        return update, None
    return update, spike or (None if refuse else engine.spikes.find({GRADIENT: update.grad_norm}))


def _tell(engine: TrainerEngine, spike: Spike, weighed: Sequence[Weighed]) -> str:
    """A sentence that names the trajectory with the largest share in the loss, of all ranks; all call it together.

    Raises:
        RunFailedError: the run is to end.
    """
    name, share = _largest_share(engine.ranks, weighed)
    text = f"spike: {spike}; trajectory {name} has the largest share in the loss, {share:.1%} (of absolute token losses)"
    if engine.config.trainer.spikes.action == "stop":
        raise RunFailedError(f'{text}; trainer.spikes.action is "stop": the last checkpoint stands')
    return text


def _largest_share(ranks: Ranks, weighed: Sequence[Weighed]) -> tuple[str, float]:
    """The trajectory with the largest share, and its share, from 0 to 1; its chains may lie on several ranks."""
    own: Counter[str] = Counter()
    for sizes_B, names in weighed if ranks.speaks_for_share else ():
        for size, name in zip(sizes_B.tolist(), names, strict=True):
            own[name] += size
    sizes: Counter[str] = Counter()
    for text in ranks.gather_texts(json.dumps(own)):
        sizes.update(json.loads(text))
    size, name = max((size, name) for name, size in sizes.items())
    return name, size / (sizes.total() or 1.0)


def _teach_critic(
    critic: Critic, algorithm: Algorithm, batch: PackedRows, weight: float, *, is_last: bool
) -> tuple[float, str]:
    """Forward and backward of the critic, each token with this weight.

    Returns:
        The sum of its token losses, and what is undefined in it.
    """
    values_BT = critic.forward(batch, is_last=is_last)
    if not bool(batch.mask.any()):
        critic.backward(values_BT.sum())
        return 0.0, ""
    scores = batch.scores
    losses_BT = algorithm.value_loss(values_BT, scores["values"], scores["returns"], batch.mask)
    total = losses_BT.sum()
    critic.backward(total * weight)
    if bool(total.isfinite()):
        return float(total.detach()), ""
    row = non_finite_row(losses_BT.detach(), batch.mask)
    who = "a micro-batch" if row is None else f"trajectory {batch.names[row]}"
    return float(total.detach()), f"{who} got a value loss that is not finite"


def _loss(
    algorithm: Algorithm, batch: PackedRows, logprobs_BT: Tensor, entropy_BT: Tensor
) -> tuple[Tensor, Tensor, str, Tensor]:
    """The loss of a micro-batch.

    Returns:
        Its numerator, with gradient; its sums, as `_SUMS` names them; what is undefined in it; and (B,) the numerator that
        each row's absolute token losses would give.
    """
    scores, mask_BT = batch.scores, batch.mask
    if not bool(mask_BT.any()):
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=logprobs_BT.device)
        return logprobs_BT.sum(), sums, "", logprobs_BT.new_zeros(len(mask_BT))
    policy = algorithm.policy_loss(
        TokenInputs(
            logprobs=logprobs_BT,
            mask=mask_BT,
            advantages=scores["advantages"],
            rollout_logprobs=batch.rollout_logprobs,
            entropy=entropy_BT,
            proximal_logprobs=scores.get("proximal_logprobs"),
            ref_logprobs=scores.get("ref_logprobs"),
        )
    )
    losses_BT = policy.losses * select(scores["weights"], mask_BT) if "weights" in scores else policy.losses
    whole_BT, numerator = losses_BT, loss_numerator(losses_BT, mask_BT, algorithm.aggregation, batch.sequence_tokens)
    weighed = numerator
    if policy.penalty is not None:
        whole_BT = losses_BT + policy.penalty
        numerator = loss_numerator(whole_BT, mask_BT, algorithm.aggregation, batch.sequence_tokens)
    parts = (
        numerator,
        weighed,
        policy.ratio.sum(),
        policy.clipped_low.sum(),
        policy.clipped_high.sum(),
        select(entropy_BT, mask_BT).sum(),
        policy.ratio.new_zeros(()) if policy.kl is None else policy.kl.sum(),
        kl_tokens(batch.rollout_logprobs, logprobs_BT.detach(), mask_BT, "k3").sum(),
    )
    sums = torch.stack([part.detach() for part in parts]).double()
    undefined = "" if bool(sums.isfinite().all()) else _undefined(batch, logprobs_BT, whole_BT)
    sizes_B = row_losses(whole_BT.detach().abs(), mask_BT, algorithm.aggregation, batch.sequence_tokens)
    return numerator, sums, undefined, sizes_B


def _undefined(batch: PackedRows, logprobs_BT: Tensor, losses_BT: Tensor) -> str:
    """Which trajectory got a number that is not finite at a trained place, and which number; empty if none did."""
    for what, values_BT in (("log-prob", logprobs_BT), ("loss", losses_BT)):
        row = non_finite_row(values_BT.detach(), batch.mask)
        if row is not None:
            return f"trajectory {batch.names[row]} got a {what} that is not finite"
    return ""


def _measure(mismatch: Mismatch, measured: Sequence[Measured], *, trained_on: int) -> None:
    difference_N = torch.cat([difference_N for difference_N, _ in measured]).double().cpu().numpy()
    versions_N = np.concatenate([versions for _, rows in measured for versions in rows])
    mismatch.add(difference_N, trained_on - versions_N)


def _why(engine: TrainerEngine, update: Update, undefined: str) -> str:
    texts = dict.fromkeys(text for text in engine.ranks.gather_texts(undefined) if text)
    if texts:
        return ", ".join(texts)
    return f"the gradient norm is {update.grad_norm}"


def _add(totals: Totals, plan: MiniBatchPlan, reduced: list[float], update: Update) -> None:
    for name, value in zip(_SUMS, reduced, strict=True):
        totals.sums[name] += value
    totals.denominator += plan.denominator
    totals.seen_tokens += plan.num_tokens
    totals.grad_norms.append(update.grad_norm)
