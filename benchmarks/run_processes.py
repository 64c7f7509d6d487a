"""A living run from outside: its steps, which process plays which role, how to kill one. Used by the fault benchmarks."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import redis

from laminar.cluster.processes import marked_processes
from laminar.json_lines import read_lines
from laminar.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
ROLES = ("worker", "engine", "trainer", "relay", "redis")
"""What `kill_role` can kill."""
ENGINE_MODULES = (b"rollout.engines.server", b"rollout.engines.emulated_server")
NAMED = {"worker": "rollout-", "trainer": "trainer-", "relay": "relay-"}
"""Roles that the run folder tells the process ids of, by the beginning of their names."""


def make_tiny_model() -> None:
    """Make the recipe's model and data, unless they are there."""
    if not (ROOT / "models" / "tiny" / "config.json").exists():
        subprocess.run([sys.executable, "-m", "rollout.tiny", "models/tiny"], cwd=ROOT, check=True)


def told_roles(folder: RunFolder) -> dict[str, int]:
    """Process ids by role, as the run folder tells them; empty before the run has said any."""
    with contextlib.suppress(FileNotFoundError):
        return folder.read_state().roles
    return {}


def told_steps(folder: RunFolder) -> list[int]:
    """The steps in `metrics.jsonl`, in its order."""
    lines = read_lines(folder.metrics)
    return [line["step"] for line in lines if line["kind"] == "step"]


def engine_pids(folder: RunFolder) -> list[int]:
    """The engine processes."""
    found = []
    for pid in marked_processes(folder.path.name):
        with contextlib.suppress(OSError):
            if any(module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for module in ENGINE_MODULES):
                found.append(pid)
    return found


def server_pids(folder: RunFolder) -> list[int]:
    """The Redis server, if it answers; it overwrites its environment, so it does not carry the run's mark."""
    with contextlib.suppress(redis.RedisError, ValueError), redis.Redis.from_url(folder.read_state().redis_url) as client:
        return [int(client.info("server")["process_id"])]
    return []


def role_pids(folder: RunFolder, role: str) -> list[int]:
    """The processes of `worker`, `engine`, `trainer`, `relay` or `redis` that are there now."""
    if role == "redis":
        return server_pids(folder)
    if role == "engine":
        return engine_pids(folder)
    return [pid for name, pid in sorted(told_roles(folder).items()) if name.startswith(NAMED[role])]


def kill_role(folder: RunFolder, role: str, appear_seconds: float, rng: random.Random | None = None) -> bool:
    """Send SIGKILL to a process of a role; whether there was one.

    Args:
        folder: the run's.
        role: as for `role_pids`.
        appear_seconds: one that is just being started is waited for so long.
        rng: chooses among several; None: the first.
    """
    deadline = time.monotonic() + appear_seconds
    while time.monotonic() < deadline:
        if pids := role_pids(folder, role):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(pids) if rng else pids[0], signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False
