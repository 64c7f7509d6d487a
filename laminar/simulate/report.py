"""Simulated settings as a table, as one HTML file without a script, and as a PNG (with matplotlib, an extra)."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from laminar.errors import EnvironmentSetupError
from laminar.simulate.sweep import Advice, Row
from laminar.telemetry.html_report import page, table
from laminar.telemetry.svg import Line, plot

COLUMNS = (
    "setting", "GPUs", "tokens/s", "answers/s", "staleness mean / max", "idle: trainer / replicas", "cache used",
    "wasted / masked",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """A row's texts, in the order of `COLUMNS`; of a setting only the last part of its name, GPUs as train + generate."""
    outcome, cluster = row.outcome, row.setting.cluster
    label = " ".join(
        part.rpartition("=")[0].rpartition(".")[2] + "=" + part.rpartition("=")[2] for part in row.label.split()
    )
    return (
        label or "as configured",
        f"{cluster.trainer.num_gpus} + {cluster.num_replicas} x {cluster.engine.num_gpus}",
        f"{outcome.tokens_per_second:,.0f}",
        f"{outcome.trajectories_per_second:.2f}",
        f"{outcome.mean_staleness:.2f} / {outcome.max_staleness}",
        f"{100 * outcome.trainer_idle_share:.0f} / {100 * outcome.rollout_idle_share:.0f} %",
        f"{100 * outcome.kv_use:.0f} %",
        f"{100 * outcome.wasted_share:.1f} / {100 * outcome.masked_share:.1f} %",
    )


def text_table(rows: Sequence[Row]) -> str:
    """The rows in plain text, a line each, and what the columns are."""
    head = ("setting", "GPUs", "tokens/s", "answers/s", "staleness", "idle", "cache", "lost")
    lines = [head, *map(cells, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    padded = ["  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    legend = (
        "GPUs: training + replicas x GPUs of each; staleness: mean / largest; idle: trainer / replicas;\n"
        "cache: mean share in use; lost: sampled tokens of evicted answers / masked ones"
    )
    return "\n".join([*padded, legend])


def advice_lines(advice: Advice) -> list[str]:
    """The recommendation in words."""
    split = advice.split
    bound = "unbounded" if advice.bound is None else advice.bound
    return [
        f"For {advice.num_gpus} GPUs: trainer.num_ranks = {split.train_gpus}, rollout.num_workers = {split.num_replicas}, "
        f"rollout.max_in_flight_groups = {advice.max_in_flight_groups}, staleness.max_staleness = {bound}: "
        f"{advice.outcome.tokens_per_second:,.0f} tokens/s.",
        f"Why: {advice.reason}",
    ]


def as_json(rows: Sequence[Row], advices: Sequence[Advice]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "rows": [
            {
                "setting": row.label,
                "train_gpus": row.setting.cluster.trainer.num_gpus,
                "num_replicas": row.setting.cluster.num_replicas,
                "gpus_per_replica": row.setting.cluster.engine.num_gpus,
                **row.outcome.figures(),
            }
            for row in rows
        ],
        "advice": [
            {
                "num_gpus": advice.num_gpus,
                "train_gpus": advice.split.train_gpus,
                "num_replicas": advice.split.num_replicas,
                "max_staleness": advice.bound,
                "max_in_flight_groups": advice.max_in_flight_groups,
                "train_seconds": advice.split.train_seconds,
                "generate_seconds": advice.split.generate_seconds,
                "tokens_per_second": advice.outcome.tokens_per_second,
                "reason": advice.reason,
            }
            for advice in advices
        ],
    }


def series(rows: Sequence[Row]) -> list[tuple[str, str, list[tuple[str, list[float]]]]]:
    """(title, unit, lines) of every plot; each line has one value a row."""
    outcomes = [row.outcome for row in rows]
    values = sorted({k for outcome in outcomes for k in outcome.staleness})
    return [
        ("Throughput", "trained tokens/s", [("tokens/s", [o.tokens_per_second for o in outcomes])]),
        (
            "Staleness of trained trajectories",
            "share",
            [(f"staleness {k}", [o.staleness.get(k, 0.0) for o in outcomes]) for k in values[:6]],
        ),
        (
            "Idle",
            "share of the time",
            [
                ("trainer", [o.trainer_idle_share for o in outcomes]),
                ("replicas", [o.rollout_idle_share for o in outcomes]),
            ],
        ),
        (
            "Waste",
            "share of the sampled tokens",
            [("evicted", [o.wasted_share for o in outcomes]), ("masked", [o.masked_share for o in outcomes])],
        ),
    ]


def html(rows: Sequence[Row], advices: Sequence[Advice], title: str) -> str:
    """The report as one file; plots have the rows' numbers (from 1) on the x axis."""
    xs = [float(number) for number in range(1, len(rows) + 1)]
    drawn = [plot(name, unit, xs, [Line(label, values) for label, values in lines]) for name, unit, lines in series(rows)]
    numbered = [(f"{number}: {texts[0]}", *texts[1:]) for number, texts in enumerate(map(cells, rows), start=1)]
    advice = "".join(f"<p>{escape(text)}</p>" for advice in advices for text in advice_lines(advice))
    return page(
        title,
        [
            f"<h2>Recommended</h2>{advice}" if advice else "",
            f"<h2>Settings</h2>{table(numbered, COLUMNS)}",
            f'<h2>Plots (by setting)</h2><div class="plots">{"".join(drawn)}</div>',
        ],
    )


def write_png(rows: Sequence[Row], path: Path) -> None:
    """The plots as a picture.

    Raises:
        EnvironmentSetupError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentSetupError(
            f"a PNG needs matplotlib, which is not installed ({error}); pip install laminar-rl[simulate], or use --html"
        ) from error
    plots = series(rows)
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    places = range(len(rows))
    names = [row.label.rpartition(".")[2] or f"{row.setting.num_gpus} GPUs" for row in rows]
    for axes, (title, unit, lines) in zip(figure.subplots(2, 2).flat, plots, strict=True):
        for label, values in lines:
            axes.plot(places, values, marker="o", label=label)
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.set_xticks(list(places), names, rotation=30, ha="right")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
