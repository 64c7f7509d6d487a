"""What a run takes of the driver's machine: memory, shared memory, processor time (Linux). It knows no roles."""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from laminar.cluster.processes import marked_processes, resident_bytes

BLOCK_BYTES = 512
"""Unit of `st_blocks`, whatever the file system's own."""


class UsageMeter:
    """Measures one run, this process included.

    Args:
        run_id: marks its processes and its shared memory.
        shared_root: folder that holds the stores of weights.
    """

    def __init__(self, run_id: str, shared_root: Path) -> None:
        self._run_id, self._shared_root = run_id, shared_root
        self._processor: dict[int, float] = {}
        self._measured_at: float | None = None

    def measure(self) -> dict[str, float]:
        """Metrics of now; processor time is that since the last call, and 0 at first."""
        pids = [os.getpid(), *marked_processes(self._run_id)]
        now, processor = time.monotonic(), processor_seconds(pids)
        span = now - self._measured_at if self._measured_at is not None else 0.0
        spent = sum(seconds - self._processor.get(pid, 0.0) for pid, seconds in processor.items())
        self._processor, self._measured_at = processor, now
        return {
            "system/host_memory_bytes": resident_bytes(pids),
            "system/shared_memory_bytes": held_bytes(self._shared_root.glob(f"laminar-{self._run_id}-*")),
            "system/cpu_ratio": spent / span / len(os.sched_getaffinity(0)) if span > 0 else 0.0,
        }


def processor_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Seconds of processor time that each process has spent since its start; one that has gone is left out."""
    ticks = os.sysconf("SC_CLK_TCK")
    spent = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold blanks
            spent[pid] = (int(fields[11]) + int(fields[12])) / ticks
    return spent


def held_bytes(places: Iterable[Path]) -> int:
    """Bytes that files take, folders with all that is in them; what goes meanwhile is left out."""
    total = 0
    for place in places:
        for folder, _, names in os.walk(place):  # which passes over folders that go while it walks
            for name in ("", *names):
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(folder, name)).st_blocks * BLOCK_BYTES
    return total
