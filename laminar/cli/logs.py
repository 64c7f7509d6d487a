"""`laminar logs`: what the roles of a run wrote, one role or all of them in order of time."""

import heapq
import time
from collections import deque
from collections.abc import Iterator
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
    files = find_logs(RunFolder.open(run), role)
    ends = {file: file.stat().st_size for file in files}
    shown = last_lines(files, lines)
    for name, line in shown:
        typer.echo(line if role else f"{name:>12}  {line}")
    if not shown:
        typer.echo(f"{role or 'every role'} has written nothing so far", err=True)
    while follow:
        time.sleep(FOLLOW_SECONDS)
        for file in files:
            size = file.stat().st_size
            with file.open("rb") as stream:
                stream.seek(ends[file] if size >= ends[file] else 0)
                for text in stream.read().decode(errors="replace").splitlines():
                    typer.echo(text if role else f"{file.stem:>12}  {text}")
                ends[file] = stream.tell()


def find_logs(folder: RunFolder, role: str) -> list[Path]:
    """The log of one role, or all logs.

    Raises:
        ConfigError: there is none.
    """
    found = sorted(folder.logs.glob("*.log"))
    chosen = [file for file in found if not role or file.stem == role]
    if not chosen:
        there = ", ".join(file.stem for file in found) or "none yet"
        raise ConfigError(f"run {folder.path.name} has no log of {role or 'any role'}; there are: {there}")
    return chosen


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


def changed_at(file: Path) -> str:
    """When the file last changed, as a stamp."""
    seconds = file.stat().st_mtime
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))},{int(seconds % 1 * 1000):03d}"


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
