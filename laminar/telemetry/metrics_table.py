"""The table of all metrics, for the docs: `python -m laminar.telemetry.metrics_table > laminar/telemetry/METRICS.md`."""

from collections.abc import Sequence
from itertools import groupby

from laminar.telemetry.registry import METRICS, Metric

BAR = "\\|"
"""A bar that ends no cell."""
HEAD = """# Metrics

Made from `registry.py` by `python -m laminar.telemetry.metrics_table`. A name that ends in `*` stands for a family.
Prometheus has the same names with `laminar_` before them and `_` for `/`; what varies in most families' names is a label.
"""


def metrics_table(metrics: Sequence[Metric] = METRICS) -> str:
    """Markdown: one table for each area, in the order in which areas are first declared."""
    areas = list(dict.fromkeys(area_of(metric) for metric in metrics))
    parts = [HEAD]
    for area, members in groupby(sorted(metrics, key=lambda metric: areas.index(area_of(metric))), key=area_of):
        rows = [f"| `{m.name}` | {m.unit} | {m.type} | {m.meaning.replace('|', BAR)} |" for m in members]
        parts.append("\n".join([f"## {area}", "", "| name | unit | type | meaning |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def area_of(metric: Metric) -> str:
    """The part of the name before the slash."""
    return metric.name.partition("/")[0]


if __name__ == "__main__":
    print(metrics_table(), end="")
