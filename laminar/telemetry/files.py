"""`metrics.jsonl`: one line per step or evaluation, one point per step also across resumes.

Invariant: the step axis is strictly increasing. A resume at step s first removes lines of later steps: what a dead life
logged above its checkpoint is not part of the committed history.
"""

import json
import os
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1


class MetricsFile:
    """Appends lines; survives a kill in the middle of one.

    Attributes:
        last_step: the newest step that has its line; 0 before the first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last_step = self._find_last_step()

    def rewind(self, step: int) -> None:
        """Drop lines whose step is above `step`, and a torn last line."""
        if not self._path.exists():
            return
        kept = [json.dumps(line) for line in read_lines(self._path) if line.get("step", 0) <= step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, self._path)
        self.last_step = self._find_last_step()

    def append(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Add one line; a step that is there already is not added again."""
        if kind == "step":
            if step <= self.last_step:
                return
            self.last_step = step
        line = json.dumps({"format_version": FORMAT_VERSION, "kind": kind, "step": step, **values})
        with self._path.open("a") as file:
            file.write(line + "\n")

    def _find_last_step(self) -> int:
        lines = read_lines(self._path) if self._path.exists() else []
        return max((line["step"] for line in lines if line["kind"] == "step"), default=0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a torn last line is left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
