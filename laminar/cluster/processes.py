"""Finding, measuring and ending the processes of a run, by the mark in their environment (Linux)."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from laminar.cluster.roles import RUN_ID_VARIABLE


def marked_processes(run_id: str) -> list[int]:
    """Ids of all processes that were started with the run's mark in their environment, this one excepted."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def end_processes(run_id: str, seconds: float) -> list[int]:
    """Kill every marked process; returns the ids that are still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while remaining := marked_processes(run_id):
        if time.monotonic() > deadline:
            return remaining
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return []


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory that the processes have to themselves (anonymous pages), together, in bytes.

    Mapped files and shared memory are not in it. A counter of the kernel: to tell who shares which page it would walk the
    page tables, for tenths of a second in a process of some gigabytes, which meanwhile cannot map memory.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) * 1024
    return total
