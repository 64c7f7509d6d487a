"""Outlives a killed supervisor for long enough to end what it started.

The supervisor holds the other end of this process's standard input. When that end closes without the word `done`, the
supervisor died: every process that carries the run's mark is killed and the run's shared memory and scratch folders are
removed. Ray leaves some of its own processes behind when its driver is killed; exit hooks do not run on SIGKILL; this does.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from laminar.cluster.processes import end_processes
from laminar.cluster.roles import RUN_ID_VARIABLE

END_SECONDS = 20.0


class Sentinel:
    """The supervisor's handle on its sentinel."""

    def __init__(self, run_id: str, folders: list[str], life_lock: int | None = None) -> None:
        self._run_id, self._folders, self._life_lock = run_id, folders, life_lock
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
        return subprocess.Popen(
            [sys.executable, "-m", "laminar.cluster.sentinel", "--run-id", self._run_id, *self._folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if self._life_lock is None else (self._life_lock,),
            env=environment,
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ensure(self) -> bool:
        """Start it again if somebody killed it; whether that was needed."""
        if self._process.poll() is None:
            return False
        self._process = self._start()
        return True

    def dismiss(self, seconds: float = 30.0) -> None:
        """Tell it that all is in order; it makes sure of that, and ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.write(b"done\n")
            self._process.stdin.close()
            self._process.wait(seconds)
        remove_folders(self._folders)  # it has done so, unless somebody killed it


def main() -> None:
    """Wait for the supervisor's word or death, then clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("folders", nargs="*", help="glob patterns of folders to remove")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_processes(arguments.run_id, END_SECONDS)
    remove_folders(arguments.folders)


def remove_folders(patterns: Iterable[str]) -> None:
    """Delete every folder that a pattern names."""
    for pattern in patterns:
        path = Path(pattern)
        for folder in path.parent.glob(path.name):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
