"""Does watching a run cost little, and does its page open at once?

Three figures, in one process, nothing of it a test:

- telemetry: the observer's CPU time for 1,000 metrics a second from 64 roles (each twice a second), as a share of one core;
  events come from a real Redis, and are written to real files. Bar: below 5 %.
- history: a run folder of 100,000 steps; seconds that a page's first answers take (state, and the overview's columns). Bar:
  below 1 s. The file is read once, when the dashboard starts; that time is stated beside it (`first_open_seconds`).

    python -m benchmarks.dashboard [--quick]
"""

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from laminar.config.load import dump_toml
from laminar.config.root import LaminarConfig
from laminar.dashboard.source import RunSource
from laminar.experience.client import connect
from laminar.experience.server import EmbeddedServer
from laminar.run_folder import RunFolder, RunState
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.observer import Observer
from laminar.telemetry.sinks.trace import TraceSink
from laminar.telemetry.stream import TelemetryReader, TelemetryWriter
from laminar.telemetry.view import RunView

ROLES, METRICS_PER_SECOND, REPORTS_PER_SECOND = 64, 1000, 2
CPU_BAR, OPEN_BAR_SECONDS = 0.05, 1.0
OVERVIEW = (
    "train/loss",
    "reward/mean",
    "throughput/*",
    "staleness/versions_*",
    "experience/ready_groups",
    "time/step_seconds",
)
NAMES = (
    "engine/running", "engine/waiting", "engine/kv_use_ratio", "engine/generated_tokens", "worker/open_trajectories",
    "worker/finished_trajectories", "worker/version_number", "weights/swap_seconds",
)  # fmt: skip


def make_folder(directory: Path, num_steps: int, seed: int) -> RunFolder:
    """A finished run with a history."""
    random.seed(seed)
    folder = RunFolder.create(directory, "bench")
    folder.config.write_text(dump_toml(LaminarConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}})))
    folder.write_state(RunState("bench", "token", os.getpid(), "finished"))
    names = [
        "train/loss", "train/entropy", "train/grad_norm", "train/tokens", "reward/mean", "reward/finished_mean",
        "mismatch/kl", "throughput/trained_tokens_per_second", "throughput/generated_tokens_per_second", "time/step_seconds",
        "time/sample_wait_seconds", "experience/ready_groups", "experience/open_groups", "experience/admitted",
        *(f"staleness/versions_{what}" for what in ("mean", "p50", "p95", "max")),
        *(f"staleness/histogram_{age}" for age in range(4)),
        *(f"rollout/response_tokens_{what}" for what in ("mean", "p50", "p95", "max")),
    ]  # fmt: skip
    with folder.metrics.open("w") as file:
        for step in range(1, num_steps + 1):
            line = {"format_version": 1, "kind": "step", "step": step, "time": 1e9 + step, "batch": "0123456789abcdef"}
            file.write(json.dumps(line | {name: round(random.random(), 6) for name in names}) + "\n")
    return folder


async def measure_observer(directory: Path, seconds: float) -> dict[str, float]:
    """CPU time of the observer for events at the stated rate, made beforehand so that only reading is measured."""
    folder = RunFolder.create(directory, "telemetry")
    with EmbeddedServer(directory / "redis") as server:
        client = await connect(server.url)
        per_report = max(1, round(METRICS_PER_SECOND / ROLES / REPORTS_PER_SECOND))
        reports = int(ROLES * REPORTS_PER_SECOND * seconds)
        writers = [TelemetryWriter(client, "bench", f"rollout-{number}") for number in range(ROLES)]
        for number in range(reports):
            metrics = {name: float(number) for name in NAMES[:per_report]}
            spans = [["decode", float(number), number + 0.5]]
            await writers[number % ROLES].emit("worker", metrics, fields={"spans": spans})
        reader = TelemetryReader(client, "bench")
        sinks = [TraceSink(folder.path / "trace.json")]
        observer = Observer(reader, MetricsFile(folder.metrics), RunView(1), lambda event: None, folder, sinks)
        before = resource.getrusage(resource.RUSAGE_SELF)
        await observer.drain()
        after = resource.getrusage(resource.RUSAGE_SELF)
        await client.aclose()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": cpu, "events": reports, "metrics": reports * per_report, "core_share": cpu / seconds}


def measure_opening(folder: RunFolder, repeats: int) -> dict[str, Any]:
    """Seconds until the first answers of a fresh dashboard, and of an open one."""
    first, later = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        source = RunSource(folder)
        source.history.refresh()
        answer(source)
        first.append(time.perf_counter() - started)
        started = time.perf_counter()
        answer(source)
        later.append(time.perf_counter() - started)
    return {"first_open_seconds": sorted(first)[repeats // 2], "page_open_seconds": sorted(later)[repeats // 2]}


def answer(source: RunSource) -> int:
    """What the overview asks for when it opens; the answers' length."""
    state = source.state()
    wanted = [name for name in source.history.columns if any(name.startswith(part.rstrip("*")) for part in OVERVIEW)]
    return len(json.dumps(state)) + len(json.dumps(source.history.thinned(600, wanted)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; below 55 s on two cores")
    arguments = parser.parse_args()
    seconds, repeats = (30.0, 3) if arguments.quick else (300.0, 9)
    with tempfile.TemporaryDirectory() as name:
        observer = asyncio.run(measure_observer(Path(name), seconds))
        print(
            f"observer: {100 * observer['core_share']:.2f} % of one core for {METRICS_PER_SECOND} metrics/s, {ROLES} roles"
        )
        opening = measure_opening(make_folder(Path(name), 100_000, seed=0), repeats)
        read, opened = opening["first_open_seconds"], opening["page_open_seconds"]
        print(f"100,000 steps: read in {read:.2f} s, then a page opens in {opened:.3f} s")
    result = {
        "name": "dashboard", "value": opening["page_open_seconds"], "unit": "s", "bar": OPEN_BAR_SECONDS,
        "holds": opening["page_open_seconds"] < OPEN_BAR_SECONDS and observer["core_share"] < CPU_BAR,
        "cpu_bar": CPU_BAR, **observer, **opening, "steps": 100_000, "machine": platform.processor() or platform.machine(),
        "load": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
