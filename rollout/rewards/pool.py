"""Heavy checks in processes that can be killed: one call at a time each, every call under a deadline.

A thread cannot be ended, and a library's own time limit by signal works in a main thread only (case D21); so each check runs
in the main thread of a process of its own, which is killed and replaced when it takes too long. That is a failure of the
verifier, never a wrong answer. Works from any thread. It does not know what is checked.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from laminar.types import FailureKind
from rollout.boundary import EpisodeError
from rollout.rewards.pool_process import HEAD_BYTES

START_SECONDS = 120.0
"""Deadline for a process to import what it needs."""
_ROOT = Path(__file__).resolve().parents[2]


class ProcessPool:
    """Processes that run one function, `"package.module:function"`, on JSON arguments.

    Args:
        function: takes JSON values, returns one; what it raises comes back as an error.
        size: most processes at once.
        seconds: deadline of one call; the wait for a free process does not count.
        warm_up: arguments of a first call in every new process, off the clock, since libraries import late.
    """

    def __init__(self, function: str, *, size: int, seconds: float, warm_up: Sequence[Any] | None = None) -> None:
        self._function, self.size, self._seconds, self._warm_up = function, size, seconds, warm_up
        self._free: list[_Worker] = []
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(size)
        weakref.finalize(self, _end_all, self._free)
        atexit.register(_end_all, self._free)

    def call(self, *arguments: Any) -> Any:
        """The function's value.

        Raises:
            EpisodeError: of kind `verifier`: it took too long, its process died, or it raised.
        """
        with self._places:
            worker = self._take()
            with ExitStack() as unless_answered:
                unless_answered.callback(worker.end)
                try:
                    outcome = worker.call(arguments, self._seconds)
                except _NoAnswerError as error:
                    raise EpisodeError(FailureKind.VERIFIER, f"{self._function} {error}") from None
                unless_answered.pop_all()
            with self._lock:
                self._free.append(worker)
        if "error" in outcome:
            raise EpisodeError(FailureKind.VERIFIER, f"{self._function} raised {outcome['error']}")
        return outcome["value"]

    def pids(self) -> list[int]:
        """Processes that are alive and free."""
        with self._lock:
            return [worker.pid for worker in self._free]

    def close(self) -> None:
        """End every free process."""
        with self._lock:
            _end_all(self._free)

    def _take(self) -> "_Worker":
        with self._lock:
            while self._free:
                worker = self._free.pop()
                if worker.is_alive():
                    return worker
                worker.end()
        try:
            return _Worker(self._function, self._seconds, self._warm_up)
        except _NoAnswerError as error:
            raise EpisodeError(FailureKind.VERIFIER, f"a process for {self._function} did not start: it {error}") from None


class _NoAnswerError(Exception):
    """A process was silent for too long, or died."""


class _Worker:
    """One process, spoken to in frames of JSON."""

    def __init__(self, function: str, seconds: float, warm_up: Sequence[Any] | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollout.rewards.pool_process", function, str(seconds), json.dumps(warm_up)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the run to handle
        )
        self.pid = self._process.pid
        with ExitStack() as unless_started:
            unless_started.callback(self.end)
            self._read(time.monotonic() + START_SECONDS)
            unless_started.pop_all()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, arguments: Any, seconds: float) -> Any:
        body = json.dumps(arguments).encode()
        assert self._process.stdin is not None
        deadline = time.monotonic() + seconds
        try:
            self._process.stdin.write(len(body).to_bytes(HEAD_BYTES, "little") + body)
        except OSError as error:
            raise _NoAnswerError("lost its process") from error
        return self._read(deadline)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, deadline: float) -> Any:
        size = int.from_bytes(self._read_bytes(HEAD_BYTES, deadline), "little")
        return json.loads(self._read_bytes(size, deadline))

    def _read_bytes(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        ends = select.poll()  # unlike `select`, for descriptors of any number
        ends.register(self._process.stdout, select.POLLIN)
        received = b""
        while len(received) < count:
            if not ends.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _NoAnswerError("took too long and was killed; raise max_seconds if that is right")
            part = os.read(self._process.stdout.fileno(), min(count - len(received), 1 << 16))
            if not part:
                raise _NoAnswerError("lost its process")
            received += part
        return received


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
