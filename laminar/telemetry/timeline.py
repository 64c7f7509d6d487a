"""`timeline.jsonl`: what every role did, for drawing. Bounded: the file is rotated, and one old file is kept.

Two kinds of lines: `spans` (one role's states with start and end, Unix seconds) and `roles` (all roles' latest metrics,
every few seconds). Losing lines loses a drawing, never a figure.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.telemetry.files import read_lines

FORMAT_VERSION = 1
ROLES_SECONDS = 5.0
MAX_BYTES = 32 * 1024**2


class TimelineFile:
    """Appends lines.

    Args:
        path: of the file; the old one lies beside it, with `.1` before its ending.
        max_bytes: size at which it is rotated.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._told = 0.0

    def add_spans(self, role: str, spans: Sequence[Sequence[Any]]) -> None:
        """One role's spans since the last ones."""
        rounded = [(state, round(start, 3), round(end, 3)) for state, start, end in spans]
        self._append({"kind": "spans", "role": role, "spans": rounded})

    def add_roles(self, now: float, roles: Mapping[str, Mapping[str, float]]) -> None:
        """All roles' metrics, unless they were told a moment ago."""
        if now - self._told >= ROLES_SECONDS:
            self._told = now
            self._append({"kind": "roles", "time": round(now, 3), "roles": roles})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"format_version": FORMAT_VERSION, **line}) + "\n")
            size = file.tell()
        if size > self._max_bytes:
            os.replace(self._path, old_file(self._path))


def old_file(path: Path) -> Path:
    """Where a rotated file lies."""
    return path.with_suffix(f".1{path.suffix}")


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """All lines that are kept, oldest first."""
    return [line for file in (old_file(path), path) if file.exists() for line in read_lines(file)]
