"""Metrics in Prometheus's text format (pure): names, units, meanings and types come from the registry.

`area/what_unit` becomes `laminar_area_what_unit`; what varies in a family's name becomes a label. A counter of a role
that was started again begins at 0, as `rate()` expects.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from laminar.telemetry.registry import METRICS, Metric

FAMILY_LABELS = {
    "reward/term_*": "term",
    "rollout/failures_*": "kind",
    "staleness/histogram_*": "versions",
    "staleness/trained_length_*": "tokens",
    "staleness/dropped_length_*": "tokens",
    "experience/evictions_*": "reason",
    "time/state_*": "state",
    "faults/restarts_*": "role",
    "system/memory_bytes_*": "kind",
}
"""What the varying part of a family's name says; other families keep it in the name."""

Sample = tuple[str, Mapping[str, str], float]
"""Metric name as in the registry, labels, value."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def render_metrics(samples: Iterable[Sample], extra: Iterable[tuple[str, str, Mapping[str, str], float]] = ()) -> str:
    """The text of `/metrics`.

    Args:
        samples: declared metrics; what is not declared is left out.
        extra: full name, meaning, labels and value of gauges that only the exporter knows.
    """
    rows: dict[str, list[str]] = defaultdict(list)
    meanings: dict[str, str] = {}
    types: dict[str, str] = defaultdict(lambda: "gauge")
    for name, labels, value in samples:
        metric = declared(name)
        if metric is not None:
            full, more = exported_name(metric, name)
            meanings[full] = f"{metric.meaning} ({metric.unit})" if metric.unit else metric.meaning
            types[full] = metric.type
            rows[full].append(f"{full}{_labels({**labels, **more})} {value:.17g}")
    for full, meaning, labels, value in extra:
        meanings[full] = meaning
        rows[full].append(f"{full}{_labels(labels)} {value:.17g}")
    parts = []
    for full in sorted(rows):
        meaning = meanings[full].replace("\\", "\\\\").replace("\n", " ")
        parts += [f"# HELP {full} {meaning}", f"# TYPE {full} {types[full]}", *rows[full]]
    return "\n".join(parts) + "\n"


def declared(name: str) -> Metric | None:
    """The metric, or the family, that a name belongs to."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((metric for metric in METRICS if "*" in metric.name and fnmatchcase(name, metric.name)), None)


def exported_name(metric: Metric, name: str) -> tuple[str, dict[str, str]]:
    """Prometheus's name of a metric, and the label that its family gives it."""
    label = FAMILY_LABELS.get(metric.name)
    if label is None:
        return _flat(name), {}
    varying = name.removeprefix(metric.name.removesuffix("*"))
    if metric.name == "time/state_*":
        return "laminar_time_state_seconds", {label: varying.removesuffix("_seconds")}
    return _flat(metric.name.removesuffix("_*")), {label: varying}


def _flat(name: str) -> str:
    return "laminar_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _labels(labels: Mapping[str, str]) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in sorted(labels.items())) + "}" if labels else ""
