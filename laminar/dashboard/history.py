"""A run's steps as columns, read once and then only where the file has grown; thinned for drawing.

Invariant: one point a step, steps ascending, as in `metrics.jsonl`; a file that was rewound by a resume is read anew.
"""

import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

MAX_EVALUATIONS = 10_000
RATES, SECONDS = "throughput/", "time/step_seconds"
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class History:
    """What `metrics.jsonl` holds.

    Attributes:
        steps: their numbers.
        columns: metric name to one value a step; None where a step does not have it.
        evaluations: lines of evaluations.
        marks: lines of marks: control, restarts.
    """

    path: Path
    steps: list[int] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0
    _inode: int = 0
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> bool:
        """Read what is new; returns whether all was read anew. While another thread reads, nothing is done."""
        if not self._reading.acquire(blocking=False):
            return False
        try:
            return self._read()
        finally:
            self._reading.release()

    def _read(self) -> bool:
        if not self.path.exists():
            return False
        status = os.stat(self.path)
        is_new = status.st_ino != self._inode or status.st_size < self._offset
        if is_new:
            self.steps, self.columns, self.evaluations, self.marks = [], {}, [], []
            self._offset, self._inode = 0, status.st_ino
        if status.st_size > self._offset:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._offset += end
            for text in data[:end].splitlines():
                self._take(text)
        return is_new

    def _take(self, text: bytes) -> None:
        try:
            line = _decode(text)
        except msgspec.DecodeError:
            return
        match line.get("kind"):
            case "step":
                self._add_step(line)
            case "evaluation":
                self.evaluations = [*self.evaluations[-MAX_EVALUATIONS:], line]
            case "mark":
                self.marks.append(line)

    def _add_step(self, line: Mapping[str, Any]) -> None:
        position, columns = len(self.steps), self.columns
        self.steps.append(line["step"])
        for name, value in line.items():
            if value.__class__ is not float and value.__class__ is not int:
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = []
            if len(column) < position:
                column.extend([None] * (position - len(column)))
            column.append(value)

    def value(self, name: str, position: int = -1) -> float | None:
        """A metric at one position, counted from the end; None if it is not there."""
        column, wanted = self.columns.get(name, []), len(self.steps) + position
        return column[wanted] if 0 <= wanted < len(column) else None

    def latest(self) -> dict[str, float]:
        """All metrics of the newest step."""
        last = len(self.steps)
        return {
            name: value for name, column in self.columns.items() if len(column) == last and (value := column[-1]) is not None
        }

    def recent(self, num_steps: int) -> dict[str, float]:
        """Rates and seconds a step over the last steps: one step alone says little."""
        begin, seconds = max(0, len(self.steps) - num_steps), self.columns.get(SECONDS, [])
        found = {n: rate(c[begin:], seconds[begin:]) for n, c in self.columns.items() if n.startswith(RATES)}
        found[SECONDS] = mean(seconds[begin:])
        return {name: value for name, value in found.items() if value is not None}

    def thinned(self, max_points: int, names: Iterable[str]) -> dict[str, Any]:
        """Columns of at most `max_points` points, each the mean over equally many neighbouring steps; rates over their time.

        Args:
            max_points: at least 1.
            names: of the columns.
        """
        steps, known = list(self.steps), self.columns  # another thread may read on, or begin anew, meanwhile
        size = max(1, math.ceil(len(steps) / max_points))
        starts = range(0, len(steps), size)
        seconds = known.get(SECONDS, [])
        columns = {
            name: [
                rate(known[name][start : start + size], seconds[start : start + size])
                if name.startswith(RATES) and size > 1
                else mean(known[name][start : start + size])
                for start in starts
            ]
            for name in names
            if name in known
        }
        last_steps = [steps[min(start + size, len(steps)) - 1] for start in starts]
        return {"steps": last_steps, "columns": columns, "steps_per_point": size}


def rate(values: Sequence[float | None], seconds: Sequence[float | None]) -> float | None:
    """Mean of rates, each for as long as its step took: one span above and below the line; None of nothing."""
    known = [(value, span) for value, span in zip(values, seconds, strict=False) if value is not None and span is not None]
    total = math.fsum(span for _, span in known)
    return mean([math.fsum(value * span for value, span in known) / total]) if total > 0 else None


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of what is there and finite, to seven digits; None of nothing."""
    if len(values) == 1:
        known = [values[0]] if values[0] is not None else []
    else:
        known = [value for value in values if value is not None]
    if not known:
        return None
    result = math.fsum(known) / len(known)
    return float(f"{result:.7g}") if math.isfinite(result) else None
