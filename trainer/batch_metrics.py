"""What a batch of trajectories looks like, as metrics. Pure.

Failed trajectories do not count, nor do greedy answers that are only compared with. Lengths are of sampled tokens, before
any mask of the loss. Averages are over trajectories.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from laminar.policies.masking import num_over_age_tokens
from laminar.policies.staleness import split_staleness
from laminar.types import Purpose, Trajectory
from trainer.algorithms.advantages import is_informative

SHORTEST_BUCKET_BITS = 6
"""Lengths up to 64 tokens share a bucket, as in the data module's count of what was dropped."""


def batch_metrics(groups: Sequence[Sequence[Trajectory]], trained_on: int, oldest_trained: int = 0) -> dict[str, float]:
    """Metrics of a batch that is about to be trained.

    Args:
        groups: the batch.
        trained_on: number of the version that it will be trained on.
        oldest_trained: tokens of versions below this number are over age.
    """
    greedy = [t.reward for group in groups for t in group if t.purpose is Purpose.GREEDY_BASELINE and t.reward is not None]
    groups = [[trajectory for trajectory in group if trajectory.purpose is Purpose.TRAIN] for group in groups]
    good = [trajectory for group in groups for trajectory in group if trajectory.failure is None]
    metrics = {"reward/zero_std_ratio": _mean(not is_informative([t.reward for t in group]) for group in groups)}
    if greedy:
        metrics["reward/greedy_mean"] = _mean(greedy)
    if good:
        metrics |= _rewards(good) | _lengths(good) | _episodes(good) | _staleness(good, trained_on)
        metrics["staleness/masked_tokens"] = float(sum(num_over_age_tokens(t, oldest_trained) for t in good))
    return metrics


def length_bucket(num_tokens: int) -> int:
    """The power of two that names a length's bucket: the smallest one, from 64 on, that it does not exceed."""
    return 1 << max(SHORTEST_BUCKET_BITS, (num_tokens - 1).bit_length())


def _rewards(good: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [trajectory.reward for trajectory in good if trajectory.reward is not None]
    terms = sorted({name for trajectory in good for name in trajectory.reward_terms})
    metrics = {f"reward/term_{name}": _mean(t.reward_terms[name] for t in good if name in t.reward_terms) for name in terms}
    return metrics | {
        "reward/mean": _mean(rewards),
        "reward/std": float(np.std(rewards)),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
    }


def _lengths(good: Sequence[Trajectory]) -> dict[str, float]:
    lengths = [trajectory.num_sampled_tokens for trajectory in good]
    finished = [trajectory.num_sampled_tokens for trajectory in good if not trajectory.is_truncated]
    return {
        "rollout/response_tokens_sum": float(sum(lengths)),
        **_distribution("rollout/response_tokens", lengths),
        **({"rollout/response_tokens_finished_mean": _mean(finished)} if finished else {}),
        "rollout/truncated_ratio": _mean(trajectory.is_truncated for trajectory in good),
        "rollout/mixed_version_ratio": _mean(len(set(trajectory.versions())) > 1 for trajectory in good),
    }


def _episodes(good: Sequence[Trajectory]) -> dict[str, float]:
    names = sorted({name for trajectory in good for name in trajectory.counts})
    return {
        "rollout/turns_mean": _mean(len(trajectory.turns) for trajectory in good),
        "rollout/chains_mean": _mean(len(trajectory.chains) for trajectory in good),
        **{f"rollout/count_{name}": _mean(trajectory.counts.get(name, 0) for trajectory in good) for name in names},
    }


def _staleness(good: Sequence[Trajectory], trained_on: int) -> dict[str, float]:
    splits = [
        split_staleness(trajectory.oldest.number, trajectory.newest.number, trained_on)
        for trajectory in good
        if trajectory.oldest is not None and trajectory.newest is not None
    ]
    histogram = Counter(split.total for split in splits)
    lengths = Counter(length_bucket(trajectory.num_sampled_tokens) for trajectory in good)
    return {
        **_distribution("staleness/versions", [split.total for split in splits]),
        **_distribution("staleness/in_flight_versions", [split.in_flight for split in splits]),
        **_distribution("staleness/in_queue_versions", [split.in_queue for split in splits]),
        **{f"staleness/histogram_{versions}": float(count) for versions, count in sorted(histogram.items())},
        **{f"staleness/trained_length_{bucket}": float(count) for bucket, count in sorted(lengths.items())},
    }


def _distribution(name: str, values: Sequence[int]) -> dict[str, float]:
    p50, p95 = np.percentile(values, [50, 95])
    ends = {"min": float(min(values)), "max": float(max(values))}
    numbers = {"mean": _mean(values), "p50": float(p50), "p95": float(p95), **ends}
    return {f"{name}_{what}": number for what, number in numbers.items()}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
