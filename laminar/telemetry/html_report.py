"""The report of a run as one HTML file that needs nothing else: figures, plots, marks, settings (pure)."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from laminar.telemetry.panel import duration
from laminar.telemetry.report import LAST_STEPS, mean_reward, reward_of, staleness_histogram
from laminar.telemetry.svg import Line, plot

STYLE = """
:root{color-scheme:light dark;--t:#1b2430;--s:#54606e;--l:#d8dee6;--p:#fff;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b0508c}
@media(prefers-color-scheme:dark){:root{--t:#e8edf3;--s:#a6b3c2;--l:#323d4a;--p:#151b23;--c0:#4aa8e0;--c1:#ff8b4d;--c2:#3fcf9f;--c3:#e6a0c8}}
body{font:15px/1.5 system-ui,"DejaVu Sans",sans-serif;color:var(--t);background:var(--p);max-width:1200px;margin:0 auto;padding:16px}
h1{font-size:22px}h2{font-size:17px;margin-top:26px}table{border-collapse:collapse}th,td{text-align:left;padding:4px 14px 4px 0;
border-bottom:1px solid var(--l);vertical-align:top}th{color:var(--s)}.plots{display:grid;gap:14px;
grid-template-columns:repeat(auto-fill,minmax(min(440px,100%),1fr))}figure{margin:0;border:1px solid var(--l);border-radius:8px;padding:10px}
figcaption{font-weight:600}svg{width:100%;height:auto}svg text{font-size:12px;fill:var(--s)}path{fill:none;stroke-width:1.8}
.grid{stroke:var(--l)}.mark{stroke:var(--s);stroke-dasharray:2 4}path.k0{stroke:var(--c0)}path.k1{stroke:var(--c1)}path.k2{stroke:var(--c2)}
path.k3{stroke:var(--c3)}.legend{margin:2px 0 0;font-size:13px}.key{margin-right:14px;border-left:14px solid;padding-left:6px}
.key.k0{border-color:var(--c0)}.key.k1{border-color:var(--c1)}.key.k2{border-color:var(--c2)}.key.k3{border-color:var(--c3)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12.5px;border:1px solid var(--l);border-radius:8px;padding:10px}
"""

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


def html_report(
    run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], config_text: str, *, bound: int | None, written_at: float
) -> str:
    """The file's text.

    Args:
        run: facts by name: `id`, `status`, `reason`, `lives`.
        lines: of `metrics.jsonl`.
        config_text: the settings, secrets starred.
        bound: K, drawn into the staleness plot; None if unbounded.
        written_at: Unix seconds.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    marks = [line for line in lines if line["kind"] == "mark"]
    title = f"Laminar run {run['id']}"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written_at))
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
        _table(_facts(run, steps, lines, when)),
        f'<h2>Course</h2><div class="plots">{"".join(_plots(steps, marks, bound))}</div>',
    ]
    if marks:
        rows = [(str(mark["step"]), mark["text"]) for mark in marks[-100:]]
        parts.append(f"<h2>Marks (step, what happened)</h2>{_table(rows)}")
    parts.append(f"<h2>Settings</h2><pre>{escape(config_text)}</pre></body></html>")
    return "".join(parts)


def _facts(
    run: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], when: str
) -> list[tuple[str, str]]:
    seconds = sum(step.get("time/step_seconds", 0.0) for step in steps)
    tokens = sum(step.get("train/tokens", 0.0) for step in steps)
    histogram = staleness_histogram(steps)
    total = sum(histogram.values()) or 1
    facts = [
        ("written", when),
        ("status", f"{run['status']}: {run['reason']}" if run["reason"] else str(run["status"])),
        ("steps", f"{len(steps)}, in {duration(seconds)} of training and {run['lives']} lives"),
        (
            "mean reward",
            f"first step {mean_reward(steps[:1]):.3f}, last {LAST_STEPS} steps {mean_reward(steps[-LAST_STEPS:]):.3f}",
        ),
        ("trained", f"{tokens:,.0f} tokens, {tokens / seconds if seconds else 0:,.1f} tokens/s"),
        ("staleness", ", ".join(f"{k}: {n} trajectories ({100 * n / total:.0f} %)" for k, n in sorted(histogram.items()))),
    ]
    accuracies = [line for line in lines if line["kind"] == "evaluation"]
    facts += [("held-out accuracy", f"{line['eval/accuracy']:.3f} at version {line['step']}") for line in accuracies]
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


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = (f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in rows)
    return f"<table>{''.join(cells)}</table>"
