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


def mean_reward(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean over steps of the reward of all that was played, filtered groups included; None if no step had one."""
    values = [value for step in steps if (value := reward_of(step)) is not None]
    return sum(values) / len(values) if values else None


def reward_of(step: Mapping[str, Any]) -> float | None:
    """Mean reward of the groups that became ready for a step; of the trained ones if there were none."""
    return step.get("reward/finished_mean", step.get("reward/mean"))


def shown_reward(reward: float | None) -> str:
    """A mean reward for people."""
    return "-" if reward is None else f"{reward:.3f}"


def summarize(facts: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the report.

    Args:
        facts: what the supervisor knows of this life: status, seconds, memory, its first step (0: none ended), seconds of
            its steps, trained and generated tokens.
        lines: the run's metrics, all lives.

    Returns:
        Of all lives, but for `life_steps` and what is told of tokens: those are of this life, whose seconds are known.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = {line["step"]: line["eval/accuracy"] for line in lines if line["kind"] == "evaluation"}
    first_step, seconds = facts["first_step"], float(facts["step_seconds"])
    trained, generated = float(facts["trained_tokens"]), float(facts["generated_tokens"])
    return {
        "steps": len(steps),
        "life_steps": sum(step["step"] >= first_step for step in steps) if first_step else 0,
        "first_reward": mean_reward(steps[:FIRST_STEPS]),
        "last_reward": mean_reward(steps[-LAST_STEPS:]),
        "accuracies": evaluations,
        "staleness": dict(sorted(staleness_histogram(steps).items())),
        "trained_tokens_per_second": trained / seconds if seconds else 0.0,
        "generated_tokens_per_second": generated / seconds if seconds else 0.0,
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
    table.add_row("steps", _steps(figures, f"{duration(float(facts['seconds']))} (start and stop included)"))
    if figures["steps"]:
        _add_training(table, figures, rewards)
    if peak := float(facts["peak_resident_bytes"]):
        table.add_row("memory", f"{peak / 1e9:.2f} GB at the peak, all processes together, without shared memory")
    if facts["restarts"]:
        table.add_row("restarts", ", ".join(f"{role}: {count}" for role, count in facts["restarts"].items()))
    for text in facts.get("restores", ()):
        table.add_row("restored", text)
    table.add_row("run folder", str(facts["folder"]))
    return table


def _steps(figures: Mapping[str, Any], spent: str) -> str:
    """How many ended, and in what time: only this life's time is known."""
    steps, of_life = figures["steps"], figures["life_steps"]
    if not steps:
        return f"none ended in {spent}"
    return f"{steps} in {spent}" if of_life == steps else f"{steps}, {of_life or 'none'} of them in this life of {spent}"


def _add_training(table: Table, figures: Mapping[str, Any], rewards: Sequence[float]) -> None:
    """What can be said once a step has ended."""
    table.add_row(
        "mean reward",
        f"first {FIRST_STEPS} steps {shown_reward(figures['first_reward'])} → "
        f"last {LAST_STEPS} steps {shown_reward(figures['last_reward'])}   {sparkline(rewards, 60)}",
    )
    for number, accuracy in shown_accuracies(figures["accuracies"]):
        table.add_row("held-out accuracy", f"{accuracy:.3f} at version {number}")
    total = sum(figures["staleness"].values()) or 1
    table.add_row(
        "staleness", "   ".join(f"{k}: {n} trajectories ({100 * n / total:.0f} %)" for k, n in figures["staleness"].items())
    )
    if not figures["life_steps"]:
        return
    since = "" if figures["life_steps"] == figures["steps"] else "in this life: "
    table.add_row(
        "throughput",
        f"{since}trained {figures['trained_tokens_per_second']:.1f} tokens/s, "
        f"generated {figures['generated_tokens_per_second']:.1f} tokens/s; "
        f"{100 * figures['generated_during_steps_ratio']:.0f} % of the generated tokens were made while a step ran",
    )
