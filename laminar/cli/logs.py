"""`laminar logs`: what the roles of a run wrote, one role or all of them in order of time."""

import contextlib
import heapq
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from laminar.cli.control import RunArgument
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder

FOLLOW_SECONDS = 0.3
STAMP_LENGTH = len("2026-01-01 00:00:00,000")
MAX_LOOK_BACK_LINES = 1000
"""So far above the lines that are shown the stamp of an endless traceback is looked for."""


def logs(
    run: RunArgument,
    role: Annotated[str, typer.Argument(help="A role such as trainer-0 or rollout-1; all roles if left out")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines shown")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C")] = False,
) -> None:
    """Show the last lines of a run's logs."""
    folder = RunFolder.open(run)
    files = find_logs(folder, role)
    follower = Follower({file: end_of_lines(file) for file in files})
    shown = last_lines(files, lines)
    _print(shown, role)
    if not shown:
        typer.echo(f"{role or 'every role'} has written nothing so far", err=True)
    while follow:
        time.sleep(FOLLOW_SECONDS)
        _print(follower.new_lines(_logs_of(folder, role)), role)


def _print(lines: Iterable[tuple[str, str]], role: str) -> None:
    for name, line in lines:
        typer.echo(line if role else f"{name:>12}  {line}")


class Follower:
    """Reads on in logs that grow, begin anew, appear and go; a line is given once it is whole."""

    def __init__(self, ends: Mapping[Path, int]) -> None:
        self._ends = dict(ends)

    def new_lines(self, files: Iterable[Path]) -> list[tuple[str, str]]:
        """(role, line) of what was written since the last look; a file not known before is read from its beginning."""
        found = []
        for file in files:
            with contextlib.suppress(FileNotFoundError), file.open("rb") as stream:
                end = self._ends.get(file, 0)
                stream.seek(end if stream.seek(0, os.SEEK_END) >= end else 0)
                begin = stream.tell()
                whole = stream.read().rpartition(b"\n")[0]
                found += [(file.stem, line) for line in whole.decode(errors="replace").splitlines()]
                self._ends[file] = begin + len(whole) + bool(whole)
        return found


def find_logs(folder: RunFolder, role: str) -> list[Path]:
    """The log of one role, or all logs.

    Raises:
        ConfigError: there is none.
    """
    chosen = _logs_of(folder, role)
    if not chosen:
        there = ", ".join(file.stem for file in _logs_of(folder, "")) or "none yet"
        raise ConfigError(f"run {folder.path.name} has no log of {role or 'any role'}; there are: {there}")
    return chosen


def _logs_of(folder: RunFolder, role: str) -> list[Path]:
    return [file for file in sorted(folder.logs.glob("*.log")) if file.is_file() and role in ("", file.stem)]


def last_lines(files: list[Path], count: int) -> list[tuple[str, str]]:
    """(role, line) of the last lines over all files, by their stamps; a line without one stays with the line before it."""
    merged = heapq.merge(*(_stamped(file, count) for file in files))
    return [(name, line) for _, name, _, line in deque(merged, maxlen=count)]


def _stamped(file: Path, count: int) -> Iterator[tuple[str, str, int, str]]:
    """The file's last lines as (stamp, role, place, line).

    What comes before the first stamp has that one; a file without any is as old as its last change.
    """
    found = tail(file, count)
    if found and not stamp_of(found[0]):
        found = tail(file, count + MAX_LOOK_BACK_LINES)
    stamp = next(filter(None, map(stamp_of, found)), "") or changed_at(file)
    for place, line in enumerate(found):
        stamp = stamp_of(line) or stamp
        if place >= len(found) - count:
            yield stamp, file.stem, place, line


def stamp_of(line: str) -> str:
    """The time that a line begins with; empty if it goes on with the line before it."""
    is_stamped = line[:2] == "20" and line[STAMP_LENGTH : STAMP_LENGTH + 1] == " "
    return line[:STAMP_LENGTH] if is_stamped else ""


def last_error(folder: RunFolder, role: str) -> str:
    """When and in which words a role's log last tells of an error; empty if its last lines tell of none."""
    file = folder.logs / f"{role}.log"
    stamp, words, is_error = "", "", False
    for line in tail(file, MAX_LOOK_BACK_LINES) if file.is_file() else ():
        if found := stamp_of(line):
            stamp, is_error = found, " ERROR " in line or " CRITICAL " in line
            words = f"{stamp} {line[STAMP_LENGTH + 1 :]}" if is_error else words
        elif is_error and line.strip():  # the last line of a traceback says what was raised
            words = f"{stamp} {line.strip()}"
    return words


def changed_at(file: Path) -> str:
    """When the file last changed, as a stamp."""
    seconds = file.stat().st_mtime
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))},{int(seconds % 1 * 1000):03d}"


def end_of_lines(file: Path, block_bytes: int = 1 << 16) -> int:
    """Where a log's last whole line ends; what is longer than a block counts as whole."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - block_bytes))
        _, newline, half = stream.read().rpartition(b"\n")
    return size - len(half) if newline or size == len(half) else size


def tail(file: Path, count: int, block_bytes: int = 1 << 16) -> list[str]:
    """The last lines of a text file, read from its end."""
    with file.open("rb") as stream:
        position, data = stream.seek(0, 2), b""
        while position > 0 and data.count(b"\n") <= count:
            step = min(block_bytes, position)
            position -= step
            stream.seek(position)
            data = stream.read(step) + data
    return data.decode(errors="replace").splitlines()[-count:]
