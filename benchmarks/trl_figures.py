"""What `benchmarks.trl` makes of what it saw: one line for each training, and the comparison. Pure."""

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TARGET, WINDOW = 0.6, 256
"""The mean reward that is to be reached, over so many of the last judged sums, of 32 prompts. Over eight prompts (64 sums)
the untrained model had means of 0.25 to 0.67, so that who came first was luck."""


@dataclass(frozen=True, slots=True)
class Task:
    """What both train."""

    name: str
    model: str
    rows: str
    max_new_tokens: int
    learning_rate: float
    stop_token_ids: tuple[int, ...]
    prompts_per_step: int = 4
    group_size: int = 8
    has_tails: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """One training, from outside.

    Attributes:
        side: whose.
        begun: Unix seconds when its process was started.
        start: when training began.
        steps: number and end of each step.
        mean_age: staleness of what was trained, in versions.
        max_age: the greatest.
        mean_tokens: sampled tokens of a trained trajectory.
    """

    side: str
    begun: float
    start: float
    steps: Sequence[tuple[int, float]]
    mean_age: float
    max_age: float
    mean_tokens: float


def report(task: Task, seed: int, seen: Seen, notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of the comparison.

    Args:
        task: that was trained.
        seed: of the training.
        seen: how it went.
        notes: what the reward noted: `at` (Unix seconds), `score`, and whether the prompt was a `long` one.
    """
    end = seen.steps[-1][1]
    notes = [note for note in notes if note["at"] <= end]
    seconds, samples = reached([note for note in notes if not note["long"]], TARGET, WINDOW)
    trained = len(seen.steps) * task.prompts_per_step * task.group_size
    return {
        "side": seen.side,
        "task": task.name,
        "seed": seed,
        "start_up_seconds": round(seen.start - seen.begun, 1),
        "seconds": round(end - seen.start, 1),
        "steps": len(seen.steps),
        "trained_per_second": round(trained / (end - seen.start), 3),
        "trained_tokens_per_second": round(trained * seen.mean_tokens / (end - seen.start), 1),
        "seconds_to_reward": None if seconds is None else round(seconds - seen.start, 1),
        "samples_to_reward": samples,
        "reward_first": round(statistics.fmean(note["score"] for note in notes[:WINDOW]), 3),
        "reward_last": round(statistics.fmean(note["score"] for note in notes[-WINDOW:]), 3),
        "untrained_share": round(max(0.0, 1 - trained / len(notes)), 3),
        "staleness_mean": round(seen.mean_age, 2),
        "staleness_max": seen.max_age,
    }


def merge_ages(ages: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean and maximum of (mean, maximum) of steps of one size."""
    return statistics.fmean(mean for mean, _ in ages), max(most for _, most in ages)


def reached(notes: Sequence[dict[str, Any]], target: float, window: int) -> tuple[float | None, int | None]:
    """When, and after how many notes, the mean score of the last `window` first was at least `target`; None if never."""
    for end in range(window, len(notes) + 1):
        if statistics.fmean(note["score"] for note in notes[end - window : end]) >= target:
            return notes[end - 1]["at"], end
    return None, None


def compare(arms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last line: ours over each side by task, and whether it is ahead of each with tails, in both respects.

    A ratio is the median over seeds: a seed's sides are played one after the other, and so on a machine of one pace. A side
    that failed or was not done in time has no figures; then nothing holds.
    """
    ratios: dict[str, dict[str, Any]] = {}
    failures = [arm for arm in arms if "failed" in arm]
    found = {(arm["task"], arm["side"], arm["seed"]): arm for arm in arms if "failed" not in arm}
    for task, side in dict.fromkeys((task, side) for task, side, _ in found if side != "ours"):
        pairs = [
            (found[task, "ours", seed], other)
            for (of, name, seed), other in found.items()
            if (of, name) == (task, side) and (task, "ours", seed) in found
        ]
        if pairs:
            delay = statistics.median(_delay(ours, other) for ours, other in pairs)
            ratios[f"{task}/{side}"] = {
                "trained_per_second": _median_ratio(pairs, "trained_per_second"),
                "trained_tokens_per_second": _median_ratio(pairs, "trained_tokens_per_second"),
                "reached_first": "ours" if delay < 1 else side if delay > 1 else "nobody",
                "first_in_seeds": [sum(_delay(*pair) < 1 for pair in pairs), len(pairs)],
            }
    tails = [ratio for name, ratio in ratios.items() if name.startswith("smollm2_tails/")]
    return {
        "name": "trl", "value": min((ratio["trained_per_second"] for ratio in tails), default=None), "bar": 1.0,
        "unit": "trained trajectories/s, ours over the better TRL, 135M model, long tails",
        "holds": bool(tails) and not failures and all(map(_is_ahead, tails)), "ratios": ratios, "failures": len(failures),
        "target": TARGET, "cores": os.cpu_count(), "load": os.getloadavg()[0], "arms": list(arms),
    }  # fmt: skip


def _is_ahead(ratio: dict[str, Any]) -> bool:
    return ratio["trained_per_second"] > 1 and ratio["reached_first"] == "ours"


def _median_ratio(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], name: str) -> float:
    return round(statistics.median(ours[name] / other[name] for ours, other in pairs), 3)


def _delay(ours: dict[str, Any], other: dict[str, Any]) -> float:
    """How much longer ours took to the reward; 1 if neither was there."""
    mine, theirs = ours["seconds_to_reward"], other["seconds_to_reward"]
    if mine is None or theirs is None:
        return 1.0 if mine is theirs else math.inf if mine is None else 0.0
    return float(mine / theirs)
