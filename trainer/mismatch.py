"""How far the trainer's log-probs at batch start are from the engine's for the same tokens, as sums that ranks can add.

Always measured: a mismatch is how a wrong temperature, a stale cache or a lossy kernel shows itself. With d = trainer -
engine at a trained token and w = exp(d). Quantiles come from a histogram of d (bins of 0.4 %), so they are of all tokens
of all ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from laminar.types import BoolArray, Int32Array
from trainer.algorithms.advantages import Float64Array
from trainer.correction import MAX_LOG_WEIGHT, k3
from trainer.ranks import Ranks

OLDEST_BUCKET = 32
"""Tokens of this staleness or more count together."""
LARGEST_LOG_RATIO = 8.0
NUM_BINS = 4097
"""Bins between the smallest and the largest log-ratio; an odd number, so that 0 is the middle of one."""
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}

UNJUDGED_STEPS = 20
"""So many steps in a row without a fresh token, and the alarm says that it cannot judge."""

_SUMS = ("weight", "applied", "applied_squared")


def _zeros(size: int) -> Float64Array:
    return np.zeros(size)


@dataclass(slots=True)
class Mismatch:
    """Sums over trained tokens. By staleness: number of tokens, k3, |d|, and tokens that the correction gave no weight."""

    tokens: Float64Array = field(default_factory=lambda: _zeros(OLDEST_BUCKET + 1))
    kl: Float64Array = field(default_factory=lambda: _zeros(OLDEST_BUCKET + 1))
    absolute: Float64Array = field(default_factory=lambda: _zeros(OLDEST_BUCKET + 1))
    masked: Float64Array = field(default_factory=lambda: _zeros(OLDEST_BUCKET + 1))
    histogram: Float64Array = field(default_factory=lambda: _zeros(NUM_BINS))
    sums: Float64Array = field(default_factory=lambda: _zeros(len(_SUMS)))
    largest: float = 0.0

    def add(self, difference_N: Float64Array, staleness_N: Int32Array, applied_N: Float64Array | None = None) -> None:
        """Count some trained tokens.

        Args:
            difference_N: d.
            staleness_N: versions between the one that sampled a token and the one trained on.
            applied_N: weight that the correction gives each, 0 where its sequence is dropped; None: there is none.
        """
        bucket_N = np.clip(staleness_N, 0, OLDEST_BUCKET).astype(np.int64)
        weight_N = np.exp(np.clip(difference_N, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))
        is_masked_N: BoolArray = np.zeros(len(weight_N), np.bool_) if applied_N is None else applied_N == 0
        applied_N = weight_N if applied_N is None else applied_N
        for sums, values in (
            (self.tokens, np.ones_like(weight_N)),
            (self.kl, k3(difference_N)),
            (self.absolute, np.abs(difference_N)),
            (self.masked, is_masked_N.astype(np.float64)),
        ):
            sums += np.bincount(bucket_N, values, OLDEST_BUCKET + 1)
        place_N = np.rint((np.clip(difference_N / LARGEST_LOG_RATIO, -1, 1) + 1) / 2 * (NUM_BINS - 1))
        self.histogram += np.bincount(place_N.astype(np.int64), minlength=NUM_BINS)
        self.sums += [weight_N.sum(), applied_N.sum(), np.square(applied_N).sum()]
        self.largest = max(self.largest, float(weight_N.max(initial=0.0)))

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Metrics of all ranks' tokens; empty if there is none. A collective."""
        parts = (self.tokens, self.kl, self.absolute, self.masked, self.histogram, self.sums)
        total = np.array(ranks.sum_shares(np.concatenate(parts).tolist()))
        tokens, kl, absolute, masked, histogram, sums = np.split(total, np.cumsum([len(part) for part in parts])[:-1])
        largest = max(ranks.gather_numbers(self.largest))
        count = float(tokens.sum())
        if not count:
            return {}
        weight, applied, squared = (float(number) for number in sums)
        by_staleness = {
            f"mismatch/{name}_staleness_{bucket}": float(values[bucket] / tokens[bucket])
            for name, values in (("kl", kl), ("masked", masked))
            for bucket in np.flatnonzero(tokens).tolist()
        }
        return by_staleness | {
            "mismatch/kl": float(kl.sum() / count),
            "mismatch/logprob_abs_diff_mean": float(absolute.sum() / count),
            "mismatch/weight_mean": weight / count,
            "mismatch/weight_max": largest,
            "mismatch/effective_sample_size_ratio": applied**2 / (count * squared) if squared else 0.0,
            "mismatch/masked_ratio": float(masked.sum() / count),
            **{f"mismatch/ratio_{name}": _quantile(histogram, share) for name, share in QUANTILES.items()},
        }


@dataclass(slots=True)
class MismatchAlarm:
    """Warns if the engine's log-probs of fresh tokens are not the trainer's: staleness does not explain that.

    Attributes:
        limit: `trainer.mismatch_alarm`, in nats a token.
        unjudged_steps: in a row up to now, that trained no fresh token.
        has_said_so: that it cannot judge, which is said once.
    """

    limit: float
    unjudged_steps: int = 0
    has_said_so: bool = False

    def judge(self, metrics: Mapping[str, float]) -> str | None:
        """What to say of a step, if anything. One that compared nothing, for it was skipped, is passed over."""
        kl = metrics.get("mismatch/kl_staleness_0")
        if kl is None:
            return self._count_unjudged() if "mismatch/kl" in metrics else None
        self.unjudged_steps = 0
        if kl <= self.limit:
            return None
        return (
            f"KL {kl:.3g} between engine and trainer on tokens of the newest weights, above "
            f"trainer.mismatch_alarm = {self.limit:g}: compare temperature, number type and weights of the two"
        )

    def _count_unjudged(self) -> str | None:
        self.unjudged_steps += 1
        if self.unjudged_steps < UNJUDGED_STEPS or self.has_said_so:
            return None
        self.has_said_so = True
        return (
            f"the last {UNJUDGED_STEPS} steps trained no token of the newest weights: trainer.mismatch_alarm has nothing to "
            "judge (said once); compare mismatch/kl_staleness_*, which grow with age, with those of a run that is well"
        )


def _quantile(histogram: Float64Array, share: float) -> float:
    """The ratio below or at which this share of the tokens lies, as the middle of its bin."""
    cumulated = np.cumsum(histogram)
    place = int(np.searchsorted(cumulated, share * cumulated[-1]))
    return float(np.exp((2 * place / (NUM_BINS - 1) - 1) * LARGEST_LOG_RATIO))
