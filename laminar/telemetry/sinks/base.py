"""A sink: something that wants a run's metrics. And the thread that keeps one away from everybody else.

Invariants: the observer never waits for a sink: what a slow one cannot take is left out, and counted; a sink that fails is
given up, with a warning; ending has a deadline. What a sink has taken stands in its position file, so that the next life, or
an observer that was started again, gives it what it lacks.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from laminar.json_lines import iterate_lines
from laminar.telemetry.stream import Event, order_of
from laminar.whole_file import replace_file

logger = logging.getLogger("laminar.observer")

Line = Mapping[str, Any]
"""A line of `metrics.jsonl`."""

MAX_WAITING = 10_000
PLAIN = ("step", "format_version", "time")
"""Numbers of a line that are no metrics."""
OPENING_FAILURES = (ImportError, OSError, ValueError, RuntimeError)
"""Errors with which a writer cannot be made; others are bugs."""
FLUSH_SECONDS = 2.0
CLOSE_SECONDS = 10.0


class Sink(Protocol):
    """Takes lines and events; each method returns soon."""

    def add_line(self, line: Line) -> None:
        """A line that was added to `metrics.jsonl`."""
        ...

    def add_event(self, event: Event) -> None:
        """An event, whether it made a line or not."""
        ...

    def rewind(self, step: int) -> None:
        """Lines above this step are no part of the history any more."""
        ...

    def close(self) -> None:
        """No more will come: write out everything."""
        ...


class Writer(Protocol):
    """What a thread drives: may be slow, may fail.

    Attributes:
        failures: the errors with which it fails; others are bugs.
    """

    failures: tuple[type[Exception], ...]

    def write(self, line: Line) -> None:
        """Take one line."""
        ...

    def rewind(self, step: int) -> None:
        """Forget what is above this step, as far as that is possible."""
        ...

    def flush(self) -> None:
        """Let what was taken be seen by others."""
        ...

    def close(self) -> None:
        """The end."""
        ...


class ThreadedSink:
    """A writer of lines in a thread of its own.

    Args:
        name: for the log.
        open_writer: makes it, in the thread; fails with `OPENING_FAILURES`.
        metrics: `metrics.jsonl`, from which lines are taken that the writer lacks.
        position: file that names the newest event it has taken.

    Attributes:
        left_out: lines that came too fast.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], Writer],
        metrics: Path,
        position: Path,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._name, self._open_writer, self._position = name, open_writer, position
        self._waiting: queue.Queue[Callable[[Writer], None]] = queue.Queue(max_waiting)
        self._ending = threading.Event()
        self._last = read_position(position)
        self._backlog = [line for line in iterate_lines(metrics) if order_of(line.get("event", "")) > self._last]
        self.left_out = 0
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def add_line(self, line: Line) -> None:
        """Put a line in the queue; a full queue leaves it out."""

        def write(writer: Writer) -> None:
            self._write(writer, line)

        self._put(write)

    def add_event(self, event: Event) -> None:
        """Lines are enough."""

    def rewind(self, step: int) -> None:
        """In its turn."""
        self._put(lambda writer: writer.rewind(step))

    def close(self) -> None:
        """Wait until everything is written, not for ever."""
        self._ending.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(_nothing)  # wakes it
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("sink %s did not end within %g s; what it had not written is lost", self._name, CLOSE_SECONDS)

    def _put(self, work: Callable[[Writer], None]) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            self.left_out += 1
            if self.left_out & (self.left_out - 1) == 0:  # 1, 2, 4, 8 ...
                logger.warning("sink %s is too slow: %d lines left out so far", self._name, self.left_out)

    def _run(self) -> None:
        try:
            writer = self._open_writer()
        except OPENING_FAILURES as error:
            self._give_up(error)
            return
        try:
            if first := next((line["step"] for line in self._backlog if line["kind"] == "step"), 0):
                writer.rewind(first - 1)  # it may have been taken, and its position not written, when a life ended
            for line in self._backlog:
                self._write(writer, line)
            self._backlog = []
            self._serve(writer)
            writer.close()
            write_position(self._position, self._last)
        except writer.failures as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning("sink %s failed and is off for the rest of this life: %s", self._name, error)

    def _serve(self, writer: Writer) -> None:
        flushed = time.monotonic()
        while not (self._ending.is_set() and self._waiting.empty()):
            with contextlib.suppress(queue.Empty):
                self._waiting.get(timeout=FLUSH_SECONDS / 4)(writer)
            if time.monotonic() - flushed > FLUSH_SECONDS:
                writer.flush()
                write_position(self._position, self._last)
                flushed = time.monotonic()

    def _write(self, writer: Writer, line: Line) -> None:
        writer.write(line)
        self._last = max(self._last, order_of(line.get("event", "")))


def _nothing(_writer: Writer) -> None:
    """Work that is done at once."""


def scalars(line: Line) -> dict[str, float]:
    """The metrics of a line."""
    return {
        name: value
        for name, value in line.items()
        if name not in PLAIN and isinstance(value, int | float) and not isinstance(value, bool)
    }


def read_position(path: Path) -> tuple[int, int]:
    """The newest event that was taken; (0, 0) if none was."""
    return order_of(path.read_text()) if path.exists() else (0, 0)


def write_position(path: Path, order: tuple[int, int]) -> None:
    """Replace the file in one rename."""
    replace_file(path, f"{order[0]}-{order[1]}")
