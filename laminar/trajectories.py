"""Trajectory records in a run's folder: compressed JSON lines, found by what they are about.

    trajectories/WORKER-NNNNN.jsonl.gz   gzip members, appended; each holds whole lines
    trajectories/steps.jsonl             which groups each step trained, and how many members each had

Invariants: a file is only ever appended to, or deleted whole; a torn member or line, or one of another shape, is passed over
and costs none after it.
Written by workers (`rollout.trajectory_log`) and the observer; this module reads them, and writes the steps.
"""

import contextlib
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laminar.json_lines import append_line, parse_line
from laminar.whole_file import replace_file

FORMAT_VERSION = 1
STEPS = "steps.jsonl"
MAX_STEPS_BYTES = 32 * 1024**2
"""Size at which the older half of the steps is dropped; records of trajectories that old are gone as well."""
MEMBER_MAGIC = b"\x1f\x8b\x08\x00"
"""How a gzip member begins."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a list shows of one record, and where it lies.

    Attributes:
        staleness: versions between its oldest token and the batch that trained it; None if it was not trained.
        step: that trained it; None if none has.
    """

    trajectory_id: str
    group_id: str
    prompt_id: str
    attempt: int
    worker: str
    time: float
    reward: float | None
    failure: str
    finish_reason: str
    num_sampled_tokens: int
    oldest: int
    newest: int
    file: str
    member: int
    line: int
    text: str
    step: int | None = None
    staleness: int | None = None


@dataclass(slots=True)
class _File:
    """What is known of one file: whole members up to `read_bytes`."""

    read_bytes: int = 0
    summaries: list[Summary] = field(default_factory=list)


class TrajectoryFolder:
    """Finds and reads records; what was read once is remembered, so a look at a growing folder costs what is new.

    Threads may look at once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}
        self._steps: dict[str, int] = {}
        self._steps_read = 0
        self._last_step_line = b""
        self._reading = threading.Lock()

    def summaries(self) -> list[Summary]:
        """All records, newest first."""
        with self._reading:
            self._refresh()
            found = [summary for file in self._files.values() for summary in file.summaries]
        return sorted(found, key=lambda summary: summary.time, reverse=True)

    def find(self, trajectory_id: str) -> Summary | None:
        """The newest record of a trajectory, by its id or the beginning of it."""
        found = self.summaries()
        exact = (s for s in found if s.trajectory_id == trajectory_id)
        return next(exact, None) or next((s for s in found if s.trajectory_id.startswith(trajectory_id)), None)

    def read(self, summary: Summary) -> Record | None:
        """The whole record; None if its file is gone, or another, meanwhile."""
        path = self._folder / summary.file
        if not path.is_file():
            return None
        for offset, _, lines in read_members(path, summary.member):
            if offset == summary.member and summary.line < len(lines):
                record = parse_line(lines[summary.line])
                return record and {**record, "step": summary.step, "staleness": summary.staleness}
        return None

    def _note_steps(self, file: _File) -> None:
        for place, summary in enumerate(file.summaries):
            if summary.step is None and not summary.failure and (step := self._steps.get(summary.group_id)) is not None:
                file.summaries[place] = replace(summary, step=step, staleness=step - 1 - summary.oldest)

    def _refresh(self) -> None:
        paths = {path.name: path for path in sorted(self._folder.glob("*.jsonl.gz"))}
        for gone in self._files.keys() - paths.keys():
            del self._files[gone]
        for name, path in paths.items():
            known = self._files.setdefault(name, _File())
            if path.stat().st_size > known.read_bytes:
                for offset, end, lines in read_members(path, known.read_bytes):
                    found = (summarize(line, name, offset, number) for number, line in enumerate(lines))
                    known.summaries += [summary for summary in found if summary is not None]
                    known.read_bytes = end
        self._read_steps()
        for file in self._files.values():
            self._note_steps(file)

    def _read_steps(self) -> None:
        path = self._folder / STEPS
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(self._steps_read - len(self._last_step_line))
            if file.read(len(self._last_step_line)) != self._last_step_line:  # it was cut, and has grown perhaps
                self._steps, self._steps_read, self._last_step_line = {}, 0, b""  # summaries keep theirs
            file.seek(self._steps_read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._steps_read += len(line)
                self._last_step_line = line
                told = parse_line(line) or {}
                step, groups = told.get("step"), told.get("groups")
                if isinstance(step, int) and isinstance(groups, dict | list):  # a list in runs of earlier versions
                    self._steps.update((group, step) for group in groups if isinstance(group, str))


def read_members(path: Path, start: int = 0) -> Iterator[tuple[int, int, list[bytes]]]:
    """(offset, end, lines) of each whole gzip member from `start` on, which is where one begins."""
    data = path.read_bytes() if start == 0 else _read_from(path, start)
    position = 0
    while position >= 0:
        stream = zlib.decompressobj(wbits=31)
        with contextlib.suppress(zlib.error):
            text = stream.decompress(data[position:])
        if not stream.eof:  # torn, by a kill or a full disk, unless it is the last and still being written
            position = data.find(MEMBER_MAGIC, position + 1)
            continue
        end = len(data) - len(stream.unused_data)
        yield start + position, start + end, text.splitlines()
        position = end


def _read_from(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def summarize(text: bytes, file: str, member: int, line: int) -> Summary | None:
    """The part of a record that a list shows; None if the line is torn, or of another shape."""
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        return _summary(parse_line(text) or {}, file, member, line)
    return None


def _summary(record: Record, file: str, member: int, line: int) -> Summary:
    texts = ["".join(s["tokens"]) for chain in record["chains"] for s in chain if s["version"] is not None]
    failure = record["failure"]
    return Summary(
        trajectory_id=record["trajectory_id"],
        group_id=record["group_id"],
        prompt_id=record["prompt_id"],
        attempt=record["attempt"],
        worker=record["worker"],
        time=record["time"],
        reward=record["reward"],
        failure=f"{failure['kind']}: {failure['text']}" if failure else "",
        finish_reason=record["finish_reason"] or "",
        num_sampled_tokens=record["num_sampled_tokens"],
        oldest=record["oldest"],
        newest=record["newest"],
        file=file,
        member=member,
        line=line,
        text=" ".join(texts)[:160],
    )


def append_step(folder: Path, step: int, groups: Mapping[str, int], max_bytes: int = MAX_STEPS_BYTES) -> None:
    """Note which groups a step trained, and of how many members; the older half goes when the file has grown too large."""
    path = folder / STEPS
    if append_line(path, {"format_version": FORMAT_VERSION, "step": step, "groups": groups}) > max_bytes:
        lines = path.read_bytes().splitlines(keepends=True)
        replace_file(path, b"".join(lines[len(lines) // 2 :]))
