"""What a run takes of the driver's machine: memory, shared memory, processor time (Linux). Of roles it knows process ids."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
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

    def measure(self, roles: Mapping[str, int]) -> dict[str, float]:
        """Metrics of now; processor time is that since the last call, and 0 at first.

        Args:
            roles: process id by role, such as `rollout-0`; memory is told by kind of role, that of children included.
        """
        pids = [os.getpid(), *marked_processes(self._run_id)]
        now, processor = time.monotonic(), processor_seconds(pids)
        span = now - self._measured_at if self._measured_at is not None else 0.0
        spent = sum(seconds - self._processor.get(pid, 0.0) for pid, seconds in processor.items())
        self._processor, self._measured_at = processor, now
        resident = {pid: resident_bytes([pid]) for pid in pids}
        kinds = {pid: role.partition("-")[0] for role, pid in roles.items()}
        held: Counter[str] = Counter()
        for pid, size in resident.items():
            held["supervisor" if pid == os.getpid() else kind_of(pid, kinds)] += size
        return {
            "system/host_memory_bytes": sum(resident.values()),
            **{f"system/memory_bytes_{kind}": size for kind, size in held.items()},
            "system/shared_memory_bytes": held_bytes(self._shared_root.glob(f"laminar-{self._run_id}-*")),
            "system/cpu_ratio": spent / span / len(os.sched_getaffinity(0)) if span > 0 else 0.0,
        }


def kind_of(pid: int, kinds: Mapping[int, str]) -> str:
    """The kind of the nearest process from this one upwards that has one; `other` if there is none (Ray, Redis, orphans)."""
    while pid > 1 and pid not in kinds:
        try:
            pid = int(status_fields(pid)[1])
        except OSError:
            return "other"
    return kinds.get(pid, "other")


def status_fields(pid: int) -> list[str]:
    """What the kernel tells of a process, from its state on, which is the third field of `/proc/PID/stat`.

    Raises:
        OSError: it has gone.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold blanks


def processor_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Seconds of processor time that each process has spent since its start; one that has gone is left out."""
    ticks = os.sysconf("SC_CLK_TCK")
    spent = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = status_fields(pid)
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
