"""Files of JSON lines that are only appended to: one object a line.

Invariants: whatever tore a line (a kill, a full disk, a loss of power), the next one begins on a new line, and readers pass
over what is torn: it costs itself, never a line after it. A file has one writer at a time.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from laminar.whole_file import append_whole

JsonLine = dict[str, Any]


def append_line(path: Path, line: Mapping[str, Any]) -> int:
    """Add a line; returns the file's size, bytes.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    begin = b"" if _ends_whole(path) else b"\n"
    return append_whole(path, begin + json.dumps(line).encode() + b"\n")


def iterate_lines(path: Path) -> Iterator[JsonLine]:
    """Whole lines of a file, one after the other; none if it is not there."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for text in file:
            if (line := parse_line(text)) is not None:
                yield line


def read_lines(path: Path) -> list[JsonLine]:
    """All of them at once."""
    return list(iterate_lines(path))


def parse_line(text: bytes) -> JsonLine | None:
    """A line's object; None if it is torn."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _ends_whole(path: Path) -> bool:
    """Whether a new line can begin at the file's end."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except FileNotFoundError:
        return True
