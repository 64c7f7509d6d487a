"""The report of a run as one HTML file that needs nothing else: figures, plots, marks, settings (pure)."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from laminar.telemetry.panel import duration
from laminar.telemetry.report import (
    HISTOGRAM,
    LAST_STEPS,
    mean_reward,
    reward_of,
    shown_accuracies,
    shown_reward,
    staleness_histogram,
)
from laminar.telemetry.svg import Line, plot

PLOTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward", "", (("mean of what was played", "reward/finished_mean"), ("of what was trained", "reward/mean"))),
    ("Loss", "", (("loss", "train/loss"),)),
    (
        "Throughput",
        "tokens/s",
        (
            ("trained", "throughput/trained_tokens_per_second"),
            ("generated", "throughput/generated_tokens_per_second"),
        ),
    ),
    (
        "Staleness of trained trajectories",
        "versions",
        (("mean", "staleness/versions_mean"), ("max", "staleness/versions_max")),
    ),
    ("Buffer", "groups", (("ready", "experience/ready_groups"), ("being played", "experience/open_groups"))),
    (
        "Step time",
        "s",
        (
            ("step", "time/step_seconds"),
            ("wait for a batch", "time/sample_wait_seconds"),
            ("forward, backward", "time/forward_backward_seconds"),
            ("publish stall", "time/publish_stall_seconds"),
        ),
    ),
    ("Mismatch KL", "", (("KL of trainer to rollout", "mismatch/kl"),)),
    ("Answer length", "tokens", (("mean", "rollout/response_tokens_mean"), ("p95", "rollout/response_tokens_p95"))),
)
TOLD = {"kind", "step", "text", "eval/accuracy", "time/step_seconds", "train/tokens"}
TOLD |= {name for _, _, wanted in PLOTS for _, name in wanted}


def told(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a run's reports tell of the lines of `metrics.jsonl`: a long run's whole lines do not fit into memory.

    A line without its kind or its step is passed over.
    """
    whole = (line for line in lines if isinstance(line.get("kind"), str) and isinstance(line.get("step"), int))
    return [{sys.intern(name): line[name] for name in line if name in TOLD or name.startswith(HISTOGRAM)} for line in whole]


def html_report(
    run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], config_text: str, *, bound: int | None, written_at: float
) -> str:
    """The file's text.

    Args:
        run: facts by name: `id`, `status`, `reason`, `lives`.
        lines: of `metrics.jsonl`, as `told` gives them.
        config_text: the settings, secrets starred.
        bound: K, drawn into the staleness plot; None if unbounded.
        written_at: Unix seconds.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    marks = [line for line in lines if line["kind"] == "mark"]
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written_at))
    parts = [
        table(_facts(run, steps, lines, when)),
        f'<h2>Course</h2><div class="plots">{"".join(_plots(steps, marks, bound))}</div>',
    ]
    if histogram := staleness_histogram(steps):
        total, head = sum(histogram.values()), ("staleness (versions)", "trained trajectories", "share")
        rows = [(str(k), f"{n:,}", f"{100 * n / total:.1f} %") for k, n in sorted(histogram.items())]
        parts.append(f"<h2>Staleness</h2>{table(rows, head)}")
    if marks:
        happened = [(str(mark["step"]), mark["text"]) for mark in marks[-100:]]
        parts.append(f"<h2>Marks (step, what happened)</h2>{table(happened)}")
    parts.append(f"<h2>Settings</h2><pre>{escape(config_text)}</pre>")
    return page(f"Laminar run {run['id']}", parts)


def page(title: str, parts: Sequence[str]) -> str:
    """A whole HTML file in the reports' style.

    Args:
        title: plain text.
        parts: HTML of the body, below the title.
    """
    style = (resources.files("laminar.telemetry") / "report.css").read_text("utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><h1>{escape(title)}</h1>"
        f"{''.join(parts)}</body></html>"
    )


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """An HTML table of plain texts; the first cell of each row is its name."""
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    lines = [f"<tr>{heads}</tr>"] if head else []
    for name, *texts in rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return f"<table>{''.join(lines)}</table>"


def _facts(
    run: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], when: str
) -> list[tuple[str, str]]:
    seconds = sum(step.get("time/step_seconds", 0.0) for step in steps)
    tokens = sum(step.get("train/tokens", 0.0) for step in steps)
    facts = [
        ("written", when),
        ("status", f"{run['status']}: {run['reason']}" if run["reason"] else str(run["status"])),
        ("steps", f"{len(steps)}, in {duration(seconds)} of training"),
        ("lives", str(run["lives"])),
        (
            "mean reward",
            f"first step {shown_reward(mean_reward(steps[:1]))}, "
            f"last {LAST_STEPS} steps {shown_reward(mean_reward(steps[-LAST_STEPS:]))}",
        ),
        ("trained", f"{tokens:,.0f} tokens, {tokens / seconds if seconds else 0:,.1f} tokens/s"),
    ]
    accuracies = {line["step"]: line["eval/accuracy"] for line in lines if line["kind"] == "evaluation"}
    facts += [("held-out accuracy", f"{found:.3f} at version {number}") for number, found in shown_accuracies(accuracies)]
    return facts


def _plots(steps: Sequence[Mapping[str, Any]], marks: Sequence[Mapping[str, Any]], bound: int | None) -> list[str]:
    xs = [float(step["step"]) for step in steps]
    at = [float(mark["step"]) for mark in marks]
    drawn = []
    for title, unit, wanted in PLOTS:
        lines = [Line(label, [_value(step, name) for step in steps]) for label, name in wanted]
        if title.startswith("Staleness") and bound is not None:
            lines.append(Line("bound", [float(bound)] * len(xs), is_dashed=True))
        drawn.append(plot(title, unit, xs, lines, at))
    return drawn


def _value(step: Mapping[str, Any], name: str) -> float | None:
    return reward_of(step) if name == "reward/finished_mean" else step.get(name)
