"""The closing report of a run, from its own `metrics.jsonl`: what a person wants to know when it is over (pure)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from laminar.telemetry.panel import duration, sparkline

HISTOGRAM = "staleness/histogram_"
FIRST_STEPS, LAST_STEPS = 3, 5
"""Steps averaged for the first and the last reward."""
MAX_ACCURACIES = 5


def staleness_histogram(steps: Sequence[Mapping[str, Any]]) -> Counter[int]:
    """Trained trajectories by staleness, over all steps."""
    histogram: Counter[int] = Counter()
    for step in steps:
        for name, value in step.items():
            if name.startswith(HISTOGRAM):
                histogram[int(name.rpartition("_")[2])] += int(value)
    return histogram


def mean_reward(steps: Sequence[Mapping[str, Any]]) -> float:
    """Mean over steps of the reward of everything that was played, groups filtered as uninformative included."""
    values = [value for step in steps if (value := reward_of(step)) is not None]
    return sum(values) / len(values) if values else float("nan")


def reward_of(step: Mapping[str, Any]) -> float | None:
    """Mean reward of the groups that became ready for a step; of the trained ones if there were none."""
    return step.get("reward/finished_mean", step.get("reward/mean"))


def summarize(facts: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the report.

    Args:
        facts: what the supervisor knows of this life: status, seconds, memory, generated tokens, seconds of its steps.
        lines: the run's metrics, all lives.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = {line["step"]: line["eval/accuracy"] for line in lines if line["kind"] == "evaluation"}
    seconds = sum(step.get("time/step_seconds", 0.0) for step in steps)
    generated, life_seconds = float(facts["generated_tokens"]), float(facts["step_seconds"])
    return {
        "steps": len(steps),
        "first_reward": mean_reward(steps[:FIRST_STEPS]),
        "last_reward": mean_reward(steps[-LAST_STEPS:]),
        "accuracies": evaluations,
        "staleness": dict(sorted(staleness_histogram(steps).items())),
        "trained_tokens_per_second": sum(step.get("train/tokens", 0) for step in steps) / seconds if seconds else 0.0,
        "generated_tokens_per_second": generated / life_seconds if life_seconds else 0.0,
        "generated_during_steps_ratio": float(facts["generated_during_steps"]) / generated if generated else 0.0,
    }


def shown_accuracies(accuracies: Mapping[int, float]) -> list[tuple[int, float]]:
    """(version, accuracy) of the first evaluation and the last ones, in order."""
    ordered = sorted(accuracies.items())
    return ordered if len(ordered) <= MAX_ACCURACIES else [ordered[0], *ordered[1 - MAX_ACCURACIES :]]


def closing_report(facts: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The report as a table."""
    figures = summarize(facts, lines)
    rewards = [value for line in lines if line["kind"] == "step" and (value := reward_of(line)) is not None]
    table = Table(show_header=False, title=f"run {facts['status']}: {facts['reason']}", title_justify="left", box=None)
    table.add_column(justify="right", style="bold")
    table.add_column(overflow="fold")
    spent = f"{duration(float(facts['seconds']))} (start and stop included)"
    if figures["steps"]:
        table.add_row("steps", f"{figures['steps']} in {spent}")
        _add_training(table, figures, rewards)
    else:
        table.add_row("steps", f"none ended in {spent}")
    if peak := float(facts["peak_resident_bytes"]):
        table.add_row("memory", f"{peak / 1e9:.2f} GB at the peak, all processes together, without shared memory")
    if facts["restarts"]:
        table.add_row("restarts", ", ".join(f"{role}: {count}" for role, count in facts["restarts"].items()))
    for text in facts.get("restores", ()):
        table.add_row("restored", text)
    table.add_row("run folder", str(facts["folder"]))
    return table


def _add_training(table: Table, figures: Mapping[str, Any], rewards: Sequence[float]) -> None:
    """What can be said once a step has ended."""
    table.add_row(
        "mean reward",
        f"first {FIRST_STEPS} steps {figures['first_reward']:.3f} → last {LAST_STEPS} steps {figures['last_reward']:.3f}   "
        + sparkline(rewards, 60),
    )
    for number, accuracy in shown_accuracies(figures["accuracies"]):
        table.add_row("held-out accuracy", f"{accuracy:.3f} at version {number}")
    total = sum(figures["staleness"].values()) or 1
    table.add_row(
        "staleness", "   ".join(f"{k}: {n} trajectories ({100 * n / total:.0f} %)" for k, n in figures["staleness"].items())
    )
    table.add_row(
        "throughput",
        f"trained {figures['trained_tokens_per_second']:.1f} tokens/s, "
        f"generated {figures['generated_tokens_per_second']:.1f} tokens/s; "
        f"{100 * figures['generated_during_steps_ratio']:.0f} % of the generated tokens were made while a step ran",
    )
