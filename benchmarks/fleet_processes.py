"""What worker, manager and supervisor cost in a real run: `python -m benchmarks.fleet_processes [--quick] [--replicas N]`.

`laminar run` with Ray and every role in a process of its own; emulated engines (the paper's 32B TP4 and 32B lengths in real
time, one emulated token for `TOKEN_SCALE` real ones) and an emulated trainer; once with 2, once with 6 replicas (`--quick`:
4 alone). CPU seconds of each process are read from the kernel over `SECONDS`, once every replica has its engine.

Value: CPU milliseconds a second of worker, manager and supervisor together, for each replica of the largest run. Bar: 50,
so that 20 replicas' control fits one core. Time is not compressed, so these are a deployment's own figures, but for
episodes: one turn each, and a reward that costs nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from laminar.cluster.processes import end_processes, marked_processes
from laminar.run_folder import RunFolder
from rollout.tiny import make_model, make_rows, write_jsonl

TOKEN_SCALE, STREAM_TOKENS = 32, 8
SECONDS = 12.0
START_SECONDS = 180.0
BAR = 50.0
RECIPE = f"""
[run]
name = "fleet"
max_steps = 10000
[model]
path = "model"
[data]
path = "train.jsonl"
[[rewards]]
kind = "benchmarks.emulated_fleet:one"
[rollout]
group_size = 4
max_new_tokens = {20_000 // TOKEN_SCALE}
max_in_flight_groups = 8
weight_update = "trajectory"
[rollout.engine]
kind = "emulated"
max_running = 256
max_cached_tokens = {110_000 // TOKEN_SCALE}
[rollout.engine.options]
latency = "32B_TP4"
lengths = "32B_math"
token-scale = {TOKEN_SCALE}
step-tokens = 64
stream-interval = {STREAM_TOKENS}
[rollout.repack]
headroom_tokens = {512 // TOKEN_SCALE}
[trainer]
kind = "emulated"
prompts_per_step = 16
[trainer.emulated]
step_seconds = [20.0]
[staleness]
max_staleness = "unbounded"
[dashboard]
enabled = false
"""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def roles_of(folder: RunFolder) -> dict[str, int]:
    """Process ids by role, the supervisor's included."""
    state = folder.read_state()
    return {**state.roles, "supervisor": state.pid}


def wait_for(condition: Callable[[], Any], process: "subprocess.Popen[bytes]", what: str) -> Any:
    """What the condition gives, once it gives something.

    Raises:
        RuntimeError: the run ended first, or it took too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while not (found := condition()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no {what} after {START_SECONDS:g} s, or the run ended (status {process.returncode})")
        time.sleep(0.2)
    return found


def engines_of(run_id: str) -> int:
    """How many engine processes a run has."""
    commands = [Path(f"/proc/{pid}/cmdline") for pid in marked_processes(run_id)]
    return sum(b"emulated_server" in command.read_bytes() for command in commands if command.exists())


def by_kind(spent: Mapping[str, float]) -> dict[str, float]:
    """CPU by kind of role."""
    kinds: dict[str, float] = {}
    for role, seconds in spent.items():
        kind = "worker" if role.startswith("rollout-") else role.partition("-")[0]
        kinds[kind] = kinds.get(kind, 0.0) + seconds
    return kinds


def measure(folder: Path, num_replicas: int) -> dict[str, Any]:
    """One run."""
    runs = folder / f"runs-{num_replicas}"
    command = [sys.executable, "-m", "laminar.cli.main", "run", str(folder / "fleet.toml"), f"run.directory={runs}"]
    command.append(f"rollout.num_workers={num_replicas}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    run_id = ""
    try:
        path = wait_for(lambda: next((p for p in runs.glob("*") if p.is_dir()), None), process, "run folder")
        run, run_id = RunFolder(path), path.name
        wait_for(lambda: engines_of(run_id) == num_replicas, process, f"{num_replicas} engines")
        time.sleep(5.0)
        roles, started = roles_of(run), time.monotonic()
        before = {role: cpu_seconds(pid) for role, pid in roles.items()}
        time.sleep(SECONDS)
        wall = time.monotonic() - started
        spent = by_kind({role: cpu_seconds(pid) - before[role] for role, pid in roles.items()})
    except RuntimeError:
        print((folder / "output.txt").read_text(), file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        if run_id:
            end_processes(run_id, 10.0)
    each = {kind: round(seconds / wall * 1000 / num_replicas, 2) for kind, seconds in sorted(spent.items())}
    return {"replicas": num_replicas, "cpu_milliseconds_a_second_and_replica": each, "seconds": round(wall, 1)}


def measure_all(sizes: list[int]) -> list[dict[str, Any]]:
    """A run for each size."""
    arms = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        make_model(folder / "model")
        write_jsonl(folder / "train.jsonl", make_rows()[0])
        (folder / "fleet.toml").write_text(RECIPE)
        for size in sizes:
            arms.append(measure(folder, size))
            print(arms[-1], flush=True)
    return arms


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="What do worker, manager and supervisor cost in a real run?")
    parser.add_argument("--quick", action="store_true", help="4 replicas only")
    parser.add_argument("--replicas", type=int, nargs="+", help="sizes of the runs")
    flags = parser.parse_args()
    arms = measure_all(flags.replicas or ([4] if flags.quick else [2, 6]))
    each = arms[-1]["cpu_milliseconds_a_second_and_replica"]
    value = sum(each.get(kind, 0.0) for kind in ("worker", "manager", "supervisor"))
    line = {
        "name": "fleet_processes", "value": round(value, 2),
        "unit": "CPU milliseconds a second and replica of worker, manager and supervisor", "bar": BAR, "holds": value <= BAR,
        "cores": os.cpu_count(), "load": os.getloadavg()[0], "arms": arms,
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
