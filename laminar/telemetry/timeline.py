"""`timeline.jsonl`: what every role did, for drawing. Bounded: the file is rotated, and one old file is kept.

Two kinds of lines: `spans` (one role's states with start and end, Unix seconds) and `roles` (all roles' latest metrics,
every few seconds). Losing lines loses a drawing, never a figure.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.json_lines import append_line, read_lines
from laminar.telemetry.stream import order_of

FORMAT_VERSION = 1
ROLES_SECONDS = 5.0
MAX_BYTES = 32 * 1024**2
TAIL_BYTES = 1024**2


class TimelineFile:
    """Appends lines.

    Args:
        path: of the file; the old one lies beside it, with `.1` before its ending.
        max_bytes: size at which it is rotated.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._told = 0.0
        self._last_event = _last_event(path)

    def add_spans(self, role: str, spans: Sequence[Sequence[Any]], event_id: str = "") -> None:
        """One role's spans since the last ones; those of an event that is drawn already are not drawn again."""
        if event_id and order_of(event_id) <= self._last_event:
            return
        rounded = [(state, round(start, 3), round(end, 3)) for state, start, end in spans]
        named = {"event": event_id} if event_id else {}
        self._append({"kind": "spans", "role": role, **named, "spans": rounded})
        self._last_event = max(self._last_event, order_of(event_id))

    def add_roles(self, now: float, roles: Mapping[str, Mapping[str, float]]) -> None:
        """All roles' metrics, unless they were told a moment ago."""
        if now - self._told >= ROLES_SECONDS:
            self._told = now
            self._append({"kind": "roles", "time": round(now, 3), "roles": roles})

    def _append(self, line: Mapping[str, Any]) -> None:
        if append_line(self._path, {"format_version": FORMAT_VERSION, **line}) > self._max_bytes:
            os.replace(self._path, old_file(self._path))


def old_file(path: Path) -> Path:
    """Where a rotated file lies."""
    return path.with_suffix(f".1{path.suffix}")


def _last_event(path: Path) -> tuple[int, int]:
    """The newest event of which there are spans, from the end of the newest file that is there."""
    file = next((file for file in (path, old_file(path)) if file.exists()), None)
    if file is None:
        return 0, 0
    with file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
        found = re.findall(rb'"event": "(\d+-\d+)"', stream.read())
    return max((order_of(event.decode()) for event in found), default=(0, 0))


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """All lines that are kept, oldest first."""
    return [line for file in (old_file(path), path) if file.exists() for line in read_lines(file)]
