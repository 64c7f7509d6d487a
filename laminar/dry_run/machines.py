"""What a machine offers: this one, as it is, or a described one."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROGRAM_SECONDS = 20.0
GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine; memory in bytes."""

    num_cores: int
    host_bytes: int
    shared_bytes: int
    num_gpus: int = 0
    gpu_bytes: int = 0


def this_machine(shared_root: Path) -> Machine:
    """The machine we are on.

    Args:
        shared_root: the memory-backed folder for weights.
    """
    memory = _gpu_memory()
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shared_bytes=shutil.disk_usage(shared_root).total if shared_root.is_dir() else 0,
        num_gpus=len(memory),
        gpu_bytes=min(memory, default=0),
    )


def _gpu_memory() -> list[int]:
    """Memory of each GPU in bytes; empty where the driver does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) * 1024**2 for line in done.stdout.split() if line.isdecimal()]


def described_machine(
    here: Machine,
    cores: int | None = None,
    memory_gb: float | None = None,
    shared_gb: float | None = None,
    gpus: int | None = None,
    gpu_gb: float | None = None,
) -> Machine:
    """A machine by what was said of it; what was not said is as here, shared memory half of a memory that was said."""
    host = here.host_bytes if memory_gb is None else round(memory_gb * GIGABYTE)
    shared = here.shared_bytes if memory_gb is None else host // 2
    return Machine(
        num_cores=cores or here.num_cores,
        host_bytes=host,
        shared_bytes=shared if shared_gb is None else round(shared_gb * GIGABYTE),
        num_gpus=here.num_gpus if gpus is None else gpus,
        gpu_bytes=here.gpu_bytes if gpu_gb is None else round(gpu_gb * GIGABYTE),
    )
