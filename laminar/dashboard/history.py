"""A run's steps as columns, read once and then only where the file has grown; thinned for drawing.

Invariants: one point a step, steps ascending, as in `metrics.jsonl`; a file that was rewound by a resume is read anew.
A value that is not finite is a gap: a page cannot read it, and its step is there.
"""

import contextlib
import json
import math
import os
import threading
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

MAX_EVALUATIONS = 10_000
RATES, SECONDS = "throughput/", "time/step_seconds"
NONE = array("d")
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class History:
    """What `metrics.jsonl` holds.

    Attributes:
        steps: their numbers.
        columns: metric name to one float64 a step, NaN where a step does not have it; to its end if it is shorter.
        evaluations: lines of evaluations.
        marks: lines of marks: control, restarts.
    """

    path: Path
    steps: list[int] = field(default_factory=list)
    columns: dict[str, "array[float]"] = field(default_factory=dict)
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
                for text in file:
                    if not text.endswith(b"\n"):  # being written
                        break
                    self._offset += len(text)
                    self._take(text)
        return is_new

    def _take(self, text: bytes) -> None:
        match _parse(text):
            case {"kind": "step", "step": int()} as line:
                self._add_step(line)
            case {"kind": "evaluation"} as line:
                self.evaluations = [*self.evaluations[-MAX_EVALUATIONS:], line]
            case {"kind": "mark"} as line:
                self.marks.append(line)

    def _add_step(self, line: Mapping[str, Any]) -> None:
        position, columns = len(self.steps), self.columns
        self.steps.append(line["step"])
        for name, value in line.items():
            if value.__class__ is not float and value.__class__ is not int:
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = array("d")
            if len(column) < position:
                column.extend([math.nan] * (position - len(column)))
            column.append(value)

    def value(self, name: str, position: int = -1) -> float | None:
        """A metric at one position, counted from the end; None if it is not there."""
        column, wanted = self.columns.get(name, NONE), len(self.steps) + position
        return next(iter(there(column[wanted : wanted + 1])), None) if wanted >= 0 else None

    def values(self, name: str, num_steps: int | None = None) -> list[float]:
        """A metric in the last steps, or in all, where it is there."""
        begin = 0 if num_steps is None else max(0, len(self.steps) - num_steps)
        return there(self.columns.get(name, NONE)[begin:])

    def latest(self) -> dict[str, float]:
        """All metrics of the newest step."""
        return {name: value for name in list(self.columns) if (value := self.value(name)) is not None}

    def recent(self, num_steps: int) -> dict[str, float]:
        """Rates and seconds a step over the last steps: one step alone says little."""
        begin, seconds = max(0, len(self.steps) - num_steps), self.columns.get(SECONDS, NONE)
        found = {n: rate(c[begin:], seconds[begin:]) for n, c in list(self.columns.items()) if n.startswith(RATES)}
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
        seconds = known.get(SECONDS, NONE)
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


def _parse(text: bytes) -> Any:
    """What a line holds, None where a number is not finite; None of a torn one."""
    try:
        return _decode(text)
    except msgspec.DecodeError:  # NaN and Infinity, which Python writes, are none of JSON's: it alone reads them
        with contextlib.suppress(ValueError):
            return json.loads(text, parse_constant=lambda _: None)
    return None


def rate(values: Iterable[float], seconds: Iterable[float]) -> float | None:
    """Mean of rates, each for as long as its step took: one span above and below the line; None of nothing."""
    pairs = [(value, span) for value, span in zip(values, seconds, strict=False) if value == value and span == span]
    total = math.fsum(span for _, span in pairs)
    return mean([math.fsum(value * span for value, span in pairs) / total]) if total > 0 else None


def mean(values: Iterable[float]) -> float | None:
    """Mean of what is there, to seven digits; None of nothing, or if it is not finite."""
    known = there(values)
    result = math.fsum(known) / len(known) if known else math.nan
    return float(f"{result:.7g}") if math.isfinite(result) else None


def there(values: Iterable[float]) -> list[float]:
    """Those that are not NaN."""
    return [value for value in values if value == value]
