"""What a run takes of the driver's machine: memory, shared memory, processor time (Linux). Of roles it knows process ids."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
        now, seen = time.monotonic(), look_at(pids)
        processor = {pid: process.processor_seconds for pid, process in seen.items()}
        span = now - self._measured_at if self._measured_at is not None else 0.0
        spent = sum(seconds - self._processor.get(pid, 0.0) for pid, seconds in processor.items())
        self._processor, self._measured_at = processor, now
        resident = {pid: resident_bytes([pid]) for pid in pids}
        kinds = {pid: role.partition("-")[0] for role, pid in roles.items()}
        held: Counter[str] = Counter()
        for pid, size in resident.items():
            held["supervisor" if pid == os.getpid() else kind_of(pid, seen, kinds)] += size
        return {
            "system/host_memory_bytes": sum(resident.values()),
            **{f"system/memory_bytes_{kind}": size for kind, size in held.items()},
            "system/shared_memory_bytes": held_bytes(self._shared_root.glob(f"laminar-{self._run_id}-*")),
            "system/cpu_ratio": spent / span / len(os.sched_getaffinity(0)) if span > 0 else 0.0,
        }


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the kernel tells it: who started it, and the processor time that it has spent since."""

    parent: int
    processor_seconds: float


def look_at(pids: Iterable[int]) -> dict[int, Process]:
    """Each process that has not gone."""
    ticks = os.sysconf("SC_CLK_TCK")
    seen = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name may hold anything, and half a letter
            fields = text.rpartition(")")[2].split()
            seen[pid] = Process(int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks)
    return seen


def kind_of(pid: int, seen: Mapping[int, Process], kinds: Mapping[int, str]) -> str:
    """The kind of the nearest process from this one upwards that has one; `other` if there is none (Ray, Redis, orphans)."""
    while pid not in kinds and pid in seen:
        pid = seen[pid].parent
    return kinds.get(pid, "other")


def held_bytes(places: Iterable[Path]) -> int:
    """Bytes that files take, folders with all that is in them, each once; what goes meanwhile is left out.

    A version is a link to the slot that it was written into.
    """
    held: dict[tuple[int, int], int] = {}
    for place in places:
        for folder, _, names in os.walk(place):  # which passes over folders that go while it walks
            for name in ("", *names):
                with contextlib.suppress(OSError):
                    found = os.stat(os.path.join(folder, name))
                    held[found.st_dev, found.st_ino] = found.st_blocks * BLOCK_BYTES
    return sum(held.values())
