"""`metrics.jsonl`: one line per step or evaluation, one point per step also across resumes.

Invariants: the step axis is strictly increasing. A resume at step s first removes lines of later steps: what a dead life
logged above its checkpoint is not part of the committed history. A line names the event it was made of, and no event makes
two lines, whoever reads the events again. A run is as long as it likes: whoever lives as long as it reads line by line.
"""

import json
from pathlib import Path
from typing import Any

from laminar.json_lines import append_line, iterate_lines
from laminar.telemetry.stream import order_of
from laminar.whole_file import replacing

FORMAT_VERSION = 1


class MetricsFile:
    """Appends lines; survives a kill in the middle of one.

    Attributes:
        last_step: the newest step that has its line; 0 before the first.
        last_event: the newest event that has one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_step, self.last_event = self._find_last()

    def rewind(self, step: int) -> None:
        """Drop lines whose step is above `step`, and a torn last line."""
        if not self.path.exists():
            return
        with replacing(self.path) as file:
            for line in iterate_lines(self.path):
                if line.get("step", 0) <= step:
                    file.write(json.dumps(line).encode() + b"\n")
        self.last_step, last_event = self._find_last()
        self.last_event = max(self.last_event, last_event)

    def append(self, kind: str, step: int, values: dict[str, Any], event_id: str = "") -> dict[str, Any] | None:
        """Add one line and return it; None if the step, or what was made of the event, is there already."""
        order = order_of(event_id)
        if (kind == "step" and step <= self.last_step) or (event_id and order <= self.last_event):
            return None
        named = {"event": event_id} if event_id else {}
        line = {"format_version": FORMAT_VERSION, "kind": kind, "step": step, **named, **values}
        append_line(self.path, line)
        self.last_step, self.last_event = max(self.last_step, step if kind == "step" else 0), max(self.last_event, order)
        return line

    def _find_last(self) -> tuple[int, tuple[int, int]]:
        """The newest step, and the newest event."""
        last_step, last_event = 0, (0, 0)
        for line in iterate_lines(self.path):
            last_step = max(last_step, line["step"] if line["kind"] == "step" else 0)
            last_event = max(last_event, order_of(line.get("event", "")))
        return last_step, last_event
