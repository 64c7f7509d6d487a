"""Does a long run leak or lose anything? `python -m benchmarks.soak [--minutes 60] [--seed S] [--quick]`.

One run of the tiny recipe with three emulated engines, repack and an emulated trainer, in which a random process is killed
with SIGKILL every 20 to 60 seconds: worker, engine, trainer, relay or Redis. All the while these are sampled: anonymous
memory and file descriptors of every process of the run; Redis's memory as it tells it, without the telemetry stream, which
fills up to its own limit in three quarters of an hour; its number of keys, without kept answers, which go after ten minutes;
shared memory. At the end Ctrl-C, then the audit of `benchmarks.faults`.

Value: problems of the audit plus series that are not flat by the rule in `slopes`. Bar: 0. Allowances: 8 MB of memory, 3
descriptors, 4 MB in Redis, 50 keys, 1 MB of shared memory. What Ray keeps of each dead process is Ray's, and allowed by the
kill: its log monitor the two log files (two descriptors), its raylet a record (0.1 MB; 0.12 to 0.2 are measured with what it
grows by without kills). `--quick`: 3 minutes, kills every 15 to 30 seconds.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from benchmarks.run_audit import history_problems
from benchmarks.run_processes import (
    ROLES,
    ROOT,
    engine_pids,
    kill_role,
    make_tiny_model,
    server_pids,
    told_roles,
    told_steps,
)
from benchmarks.slopes import Growth, measure_growth
from laminar.cluster.processes import end_processes, marked_processes, resident_bytes
from laminar.cluster.usage import held_bytes
from laminar.run_folder import RunFolder
from laminar.telemetry.stream import stream_key

PROMPTS_PER_STEP, GROUP_SIZE = 8, 8
SETTINGS = (
    "run.max_steps=1000000", "run.max_restarts=100000", "checkpoint.every_steps=20", "eval.path=''", "metrics.panel=off",
    "trainer.kind=emulated", "trainer.emulated.step_seconds=[0.5]",
    "rollout.engine.kind=emulated", "rollout.engine.options.length-scale=0.005", "rollout.engine.options.time-factor=2.0",
    "rollout.num_workers=3", "rollout.weight_update=trajectory", "rollout.max_in_flight_groups=4",
    "rollout.repack.interval_seconds=1", "rollout.repack.headroom_tokens=4", "rollout.lease_seconds=10",
    "rollout.max_attempts=100", "staleness.max_staleness=2",
)  # fmt: skip
ALLOWANCES = {"memory_mb": 8.0, "descriptors": 3.0, "redis_mb": 4.0, "redis_keys": 50.0, "shared_mb": 1.0}
KEPT_BY_RAY = {("descriptors", "log_monitor.py"): 2.0, ("memory_mb", "raylet"): 0.1}  # of each dead process
APPEAR_SECONDS, START_SECONDS, END_SECONDS = 30.0, 180.0, 120.0
MB = 1e6


@dataclass(frozen=True, slots=True)
class Pace:
    """How long, how often sampled and killed, and what of a life does not count, in seconds."""

    total: float
    sample: float
    settle: float
    kills: tuple[float, float]


@dataclass(slots=True)
class Samples:
    """Series by (what, whose), each by life."""

    lives: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, what: str, whose: str, life: int, value: float) -> None:
        """One sample of now."""
        self.lives[what, whose][life].append((time.monotonic(), value))

    def growths(self, settle_seconds: float) -> dict[tuple[str, str], Growth]:
        """Of the series that can be judged."""
        found = {name: measure_growth(lives, settle_seconds) for name, lives in sorted(self.lives.items())}
        return {name: growth for name, growth in found.items() if growth is not None}


def take_samples(folder: RunFolder, supervisor: int, samples: Samples) -> None:
    """Look at everything once; what has just died is passed over."""
    names = {pid: role for role, pid in told_roles(folder).items()} | {supervisor: "supervisor"}
    names |= dict.fromkeys(engine_pids(folder), "engine") | dict.fromkeys(server_pids(folder), "redis")
    for pid in {*marked_processes(folder.path.name), *names}:
        with contextlib.suppress(OSError):
            name = names.get(pid) or command_name(Path(f"/proc/{pid}/cmdline").read_bytes())
            if name != "redis" and (memory := resident_bytes([pid])):
                samples.add("memory_mb", name, pid, memory / MB)
            samples.add("descriptors", name, pid, len(os.listdir(f"/proc/{pid}/fd")))
    samples.add("shared_mb", "all", 0, held_bytes(Path("/dev/shm").glob(f"laminar-{folder.path.name}-*")) / MB)
    with contextlib.suppress(redis.RedisError, ValueError, OSError):
        sample_redis(folder, samples)


def sample_redis(folder: RunFolder, samples: Samples) -> None:
    """Memory beside the telemetry stream, and keys beside the kept answers, which go after ten minutes."""
    with redis.Redis.from_url(folder.read_state().redis_url) as client:
        life = int(client.info("server")["process_id"])
        stream = client.memory_usage(stream_key(folder.path.name)) or 0
        samples.add("redis_mb", "all", life, (client.info("memory")["used_memory"] - stream) / MB)
        answers = sum(1 for _ in client.scan_iter(match="*:request:*", count=1000))
        samples.add("redis_keys", "all", life, client.dbsize() - answers)


def command_name(cmdline: bytes) -> str:
    """A short name for a process without a role: its program, or the module or script that its interpreter runs."""
    words = [word.decode(errors="replace") for word in cmdline.split(b"\0") if word]
    if not words:
        return "unnamed"
    program = Path(words[0]).name
    if program.startswith("python") and len(words) > 1:
        flagless = [word for word in words[1:] if not word.startswith("-")]
        return Path(flagless[0]).name if flagless else program
    return program.split(" ")[0]


def soak(directory: Path, pace: Pace, rng: random.Random) -> dict[str, Any]:
    """The run, from its start to its audit."""
    command = [sys.executable, "-m", "laminar.cli.main", "run", "deploy/recipes/tiny.toml", *SETTINGS]
    command.append(f"run.directory={directory}")
    output = directory / "output.txt"
    with output.open("w") as file:
        run = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
        )
    killed: Counter[str] = Counter()
    samples = Samples()
    code: int | None = None
    try:
        folder = wait_for_first_step(directory, run)
        end = time.monotonic() + pace.total
        next_kill = time.monotonic() + rng.uniform(*pace.kills)
        while time.monotonic() < end and run.poll() is None:
            take_samples(folder, run.pid, samples)
            if time.monotonic() > next_kill:
                role = rng.choice(ROLES)
                killed[role] += kill_role(folder, role, APPEAR_SECONDS, rng)
                next_kill = time.monotonic() + rng.uniform(*pace.kills)
            time.sleep(pace.sample)
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = run.wait(END_SECONDS)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        for path in directory.iterdir():
            if path.is_dir() and code is None:
                end_processes(path.name, 10.0)
    problems = [] if code == 130 else [f"the run ended with {code}: {output.read_text()[-600:]}"]
    rows = (ROOT / "models" / "tiny" / "train.jsonl").read_text().splitlines()
    problems += history_problems(folder, len(rows), num_steps=None, step_trajectories=PROMPTS_PER_STEP * GROUP_SIZE)
    return {
        "problems": problems,
        "kills": dict(killed),
        "steps": len(told_steps(folder)),
        "growths": samples.growths(pace.settle),
    }


def wait_for_first_step(directory: Path, run: "subprocess.Popen[bytes]") -> RunFolder:
    """The run's folder, once it has trained.

    Raises:
        TimeoutError: it does not.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and run.poll() is None:
        for path in directory.iterdir():
            if path.is_dir() and told_steps(RunFolder(path)):
                return RunFolder(path)
        time.sleep(0.2)
    raise TimeoutError(f"no step within {START_SECONDS:g} s: {(directory / 'output.txt').read_text()[-600:]}")


def allowance(what: str, whose: str, num_kills: int) -> float:
    """What a series may grow by, in its own unit."""
    return ALLOWANCES[what] + KEPT_BY_RAY.get((what, whose), 0.0) * num_kills


def summary(seen: dict[str, Any], pace: Pace) -> dict[str, Any]:
    """The closing line."""
    growths: dict[tuple[str, str], Growth] = seen["growths"]
    growing = {
        f"{what} of {whose}": f"+{growth.growth:.2f} in {growth.seconds:.0f} s, median {growth.median:.2f}"
        for (what, whose), growth in growths.items()
        if not growth.is_flat(allowance(what, whose, sum(seen["kills"].values())))
    }
    return {
        "name": "soak", "value": len(seen["problems"]) + len(growing), "unit": "problems and growing series", "bar": 0,
        "holds": not seen["problems"] and not growing, "minutes": pace.total / 60, "steps": seen["steps"],
        "trained": seen["steps"] * PROMPTS_PER_STEP * GROUP_SIZE, "kills": seen["kills"], "problems": seen["problems"][:20],
        "growing": growing,
        "series": {
            f"{what} of {whose}": [round(growth.median, 2), round(growth.growth, 2), round(growth.seconds)]
            for (what, whose), growth in growths.items()
        },
        "cores": os.cpu_count(), "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Does a long run leak or lose anything?")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="3 minutes")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no child is left
    pace = Pace(60 * arguments.minutes, 5.0, 60.0, (20.0, 60.0))
    if arguments.quick:
        pace = Pace(180.0, 2.0, 20.0, (15.0, 30.0))
    make_tiny_model()
    with tempfile.TemporaryDirectory(prefix="laminar-soak-") as scratch:
        seen = soak(Path(scratch), pace, random.Random(arguments.seed))
    result = summary(seen, pace)
    for name, (median, growth, seconds) in result["series"].items():
        print(f"{name:45} median {median:10.2f}  growth {growth:+9.2f} in {seconds} s", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
