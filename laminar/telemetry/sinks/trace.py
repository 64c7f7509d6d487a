"""A trace of the pipeline for Perfetto (`ui.perfetto.dev`) and Chrome: one process a role, times in Unix microseconds.

| drawn as | what |
|---|---|
| slices on `state` | what a role did: decode, environment, drain, swap, idle..., wait, train, spool, publish, checkpoint |
| slices on `steps`, `weights` | the trainer's steps; pulls of an engine, versions received by a relay |
| nested slices by trajectory | episodes with their turns, in them decode and environment, and the reward |
| instants | moves, control, notices |
| counters | groups ready and in flight, staleness, requests of an engine |

Of episodes only the groups that `metrics.trajectory_rate` keeps are drawn. It draws what roles tell and measures nothing.
"""

import itertools
import logging
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.telemetry.sinks.base import Line
from laminar.telemetry.sinks.trace_file import TraceEvent, TraceFile
from laminar.telemetry.stream import Event
from laminar.telemetry.timeline import MAX_BYTES

logger = logging.getLogger("laminar.observer")

STATE, STEPS, WEIGHTS = 1, 2, 3
THREADS = {STATE: "state", STEPS: "steps", WEIGHTS: "weights"}
MOVES = ("worker/moved_trajectories", "repack/moved_trajectories")
COUNTERS = ("engine/running", "engine/waiting")
COUNTER_SECONDS = 2.0
BATCH = 200
"""Events that are written together; fewer at each line of `metrics.jsonl`, and at the end."""
SAME_SECONDS = 0.01


class TraceSink:
    """Writes `trace.json`.

    Args:
        path: of the file.
        max_bytes: at which it is rotated.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._file = TraceFile(path, max_bytes)
        self._waiting: list[TraceEvent] = []
        self._roles: set[str] = set()
        self._open: dict[str, tuple[str, float, float]] = {}
        self._counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._counted_at: defaultdict[str, float] = defaultdict(float)

    def add_line(self, line: Line) -> None:
        """A step's counters are in its line."""
        if line["kind"] == "step":
            groups = {"ready": line.get("experience/ready_groups", 0), "in flight": line.get("experience/open_groups", 0)}
            self._add(counter("groups", "supervisor", line["time"], groups))
            self._add(counter("staleness", "supervisor", line["time"], {"mean": line.get("staleness/versions_mean", 0)}))
        self._write()

    def add_event(self, event: Event) -> None:
        """What an event tells, drawn."""
        for span in event.fields.get("spans", ()):
            self._extend(event.role, *span)
        for drawn in self._drawn(event):
            self._add(drawn)
        if len(self._waiting) >= BATCH:
            self._write()

    def rewind(self, step: int) -> None:
        """What happened did happen."""

    def close(self) -> None:
        """Draw what is still going on up to now."""
        for role in list(self._open):
            self._close_span(role)
        self._write()

    def _drawn(self, event: Event) -> Iterator[TraceEvent]:
        match event.kind:
            case "step":
                begin, end = event.fields["train_started"], event.fields["train_ended"]
                step = f"step {event.metrics['train/step']:.0f}"
                yield piece(step, event.role, STEPS, begin, end, _seconds_of(event.metrics))
            case "worker":
                yield from itertools.chain.from_iterable(map(episode, itertools.repeat(event.role), _episodes(event)))
                for begin, end in event.fields.get("pulls", ()):
                    yield piece("pull", event.role, WEIGHTS, begin, end, {})
                yield from self._count(event)
            case "relay":
                seconds = event.metrics.get("weights/broadcast_seconds", 0.0)
                yield piece("receive", event.role, WEIGHTS, event.time - seconds, event.time, dict(event.metrics))
            case "control" | "notice" | "alert":
                yield instant(event.kind, event.role, event.time, "g", {"text": str(event.fields.get("text", ""))})
        yield from self._moves(event)

    def _moves(self, event: Event) -> Iterator[TraceEvent]:
        for name in MOVES:
            count = event.metrics.get(name, 0.0)
            if count > self._counts[event.role, name]:
                moved = count - self._counts[event.role, name]
                yield instant("move", event.role, event.time, "p", {"trajectories": moved})
            self._counts[event.role, name] = count

    def _count(self, event: Event) -> Iterator[TraceEvent]:
        if event.time - self._counted_at[event.role] >= COUNTER_SECONDS:
            self._counted_at[event.role] = event.time
            values = {name.partition("/")[2]: event.metrics[name] for name in COUNTERS if name in event.metrics}
            if values:
                yield counter("requests", event.role, event.time, values)

    def _extend(self, role: str, state: str, begin: float, end: float) -> None:
        """A state that goes on is one slice."""
        known = self._open.get(role)
        if known is not None and known[0] == state and begin - known[2] < SAME_SECONDS:
            self._open[role] = (state, known[1], end)
            return
        if known is not None:
            self._close_span(role)
        self._open[role] = (state, begin, end)

    def _close_span(self, role: str) -> None:
        state, begin, end = self._open.pop(role)
        self._add(piece(state, role, STATE, begin, end, {}))

    def _add(self, event: TraceEvent) -> None:
        role = event.pop("role")
        if role not in self._roles:
            self._roles.add(role)
            self._waiting += names(role)
        self._waiting.append(event)

    def _write(self) -> None:
        events, self._waiting = self._waiting, []
        if not events:
            return
        try:
            self._file.append(events, [name for role in sorted(self._roles) for name in names(role)])
        except OSError as error:
            logger.warning("trace.json cannot be written (%s); %d events lost", error, len(events))


def process_of(role: str) -> int:
    """A role's number: the same in every life, and small enough for every reader."""
    return zlib.crc32(role.encode()) % 1_000_000 + 1


def names(role: str) -> list[TraceEvent]:
    """What a role's process and its threads are called."""
    pid = process_of(role)
    threads = ((tid, name) for tid, name in THREADS.items())
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}},
        *({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}} for tid, name in threads),
    ]


def piece(name: str, role: str, thread: int, begin: float, end: float, arguments: Mapping[str, Any]) -> TraceEvent:
    """A slice from `begin` to `end`, Unix seconds."""
    start = micros(begin)
    drawn = {"ph": "X", "name": name, "cat": THREADS[thread], "ts": start, "dur": max(0, micros(end) - start)}
    return {"role": role, **drawn, "pid": process_of(role), "tid": thread, "args": dict(arguments)}


def instant(name: str, role: str, at: float, scope: str, arguments: Mapping[str, Any]) -> TraceEvent:
    """A moment; `scope` is `g` (the whole trace) or `p` (the role)."""
    drawn = {"ph": "i", "s": scope, "name": name, "cat": "mark", "ts": micros(at)}
    return {"role": role, **drawn, "pid": process_of(role), "tid": STATE, "args": dict(arguments)}


def counter(name: str, role: str, at: float, values: Mapping[str, float]) -> TraceEvent:
    """Values that are drawn as curves."""
    return {"role": role, "ph": "C", "name": name, "ts": micros(at), "pid": process_of(role), "args": dict(values)}


def episode(role: str, told: Mapping[str, Any]) -> Iterator[TraceEvent]:
    """An episode with its turns and phases, nested, apart from all others by the trajectory's id."""
    start, end = told["start"], told["start"] + told["seconds"]
    arguments = {name: told[name] for name in ("tokens", "turns", "version", "outcome")}

    def nested(name: str, begin: float, end: float, inner: Sequence[TraceEvent], arguments: Any = None) -> list[TraceEvent]:
        both = {"role": role, "cat": "episode", "id": told["id"], "pid": process_of(role), "tid": STATE, "name": name}
        return [
            {**both, "ph": "b", "ts": micros(begin), "args": arguments or {}},
            *inner,
            {**both, "ph": "e", "ts": max(micros(begin), micros(end))},
        ]

    inner: list[TraceEvent] = []
    numbers = itertools.count()
    for phases in turns_of(told["phases"]):
        drawn = [nested(PHASES[area], start + first, start + last, ()) for area, first, last in phases]
        flat = list(itertools.chain.from_iterable(drawn))
        if phases[0][0] == "generate":
            inner += nested(f"turn {next(numbers)}", start + phases[0][1], start + phases[-1][2], flat)
        else:
            inner += flat
    yield from nested("episode", start, end, inner, {"trajectory": told["id"], **arguments})


PHASES = {"generate": "decode", "environment": "environment", "reward": "reward"}


def turns_of(phases: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
    """Phases by turn: what is before the first answer, each answer with what the environment did about it, the reward."""
    turns: list[list[Sequence[Any]]] = [[]]
    for phase in phases:
        if phase[0] in ("generate", "reward"):
            turns.append([])
        turns[-1].append(phase)
    return [turn for turn in turns if turn] if turns[0] else turns[1:]


def micros(seconds: float) -> int:
    """Seconds as whole microseconds."""
    return round(seconds * 1e6)


def _episodes(event: Event) -> Sequence[Mapping[str, Any]]:
    episodes: Sequence[Mapping[str, Any]] = event.fields.get("episodes", ())
    return episodes


def _seconds_of(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("time/") or name == "train/loss"}
