"""A file of trace events in the JSON array format that Perfetto and Chrome read. Bounded: rotated, one old file is kept.

Invariants: the file is valid JSON after every write, so it can be opened while the run lives; what a kill tore is cut off.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from laminar.telemetry.timeline import MAX_BYTES, old_file

BEGIN, BETWEEN, END = b"[\n", b",\n", b"\n]\n"

TraceEvent = dict[str, Any]


class TraceFile:
    """Appends events.

    Args:
        path: of the file; the old one lies beside it, with `.1` before its ending.
        max_bytes: size at which it is rotated.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes

    def append(self, events: Sequence[TraceEvent], names: Iterable[TraceEvent]) -> None:
        """Add events.

        Args:
            events: in the order in which they are drawn.
            names: what a new file begins with: who the processes and threads are.

        Raises:
            OSError: the file cannot be written.
        """
        if self._path.exists() and self._path.stat().st_size > self._max_bytes:
            os.replace(self._path, old_file(self._path))
        if not self._path.exists():
            self._path.write_bytes(BEGIN + BETWEEN.join(_lines(names)) + END)
        with self._path.open("r+b") as file:
            end = _end_of_events(file.read()) if not _is_whole(file) else file.seek(-len(END), os.SEEK_END)
            file.seek(end)
            file.write((BETWEEN if end > len(BEGIN) else b"") + BETWEEN.join(_lines(events)) + END)
            file.truncate()


def _lines(events: Iterable[TraceEvent]) -> list[bytes]:
    return [json.dumps(event, separators=(",", ":")).encode() for event in events]


def _is_whole(file: Any) -> bool:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(END)))
    is_whole: bool = file.read() == END
    file.seek(0)
    return is_whole


def _end_of_events(content: bytes) -> int:
    """Where the last whole event of a torn file ends; after the opening bracket if there is none."""
    end = content.rfind(b"}" + BETWEEN)
    return end + 1 if end >= 0 else len(BEGIN)
