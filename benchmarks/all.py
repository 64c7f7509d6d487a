"""Every quick benchmark, one after another, and one table: `python -m benchmarks.all [--only a,b] [--scale-limits X]`.

Each runs as a process of its own (`python -m benchmarks.NAME --quick`) under a time limit and tells its figure in the last
line of its output. One that fails, or is not done in time, is ended with its children and told as such; the others go on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "engine": 180, "buffer": 180, "relay": 180, "agentic": 180, "dashboard": 180, "learning": 180, "repack": 540,
    "faults": 240, "simulate": 600, "systems": 1200, "soak": 420, "trl": 1500, "simulate_against_real": 1200,
    "trainer": 240, "fleet": 180, "fleet_processes": 180, "failover": 240, "relay_network": 180,
}  # fmt: skip
"""Seconds a benchmark may take on two quiet cores, start-up included."""
END_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one benchmark went: its last line, or why there is none."""

    name: str
    seconds: float
    result: dict[str, Any] | None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """`met` or `missed`, by the benchmark's own bar; else what kept it from telling."""
        if self.result is None:
            return self.reason
        return "met" if self.result["holds"] else "missed"


def run_benchmark(name: str, limit_seconds: float) -> Outcome:
    """Run one; it is told to end, then killed, when its time is over."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env={"OMP_NUM_THREADS": "1", **os.environ}, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return Outcome(name, time.monotonic() - started, None, f"not done in {limit_seconds:.0f} s")
    finally:
        _end(process)
    return read_outcome(name, time.monotonic() - started, process.returncode, output)


def _end(process: "subprocess.Popen[str]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def read_outcome(name: str, seconds: float, code: int, output: str) -> Outcome:
    """What a process that has ended tells with its last line."""
    lines = output.strip().splitlines()
    if code != 0 or not lines:
        return Outcome(name, seconds, None, f"ended with {code}")
    try:
        result = json.loads(lines[-1])
        return Outcome(
            name, seconds, {"value": result["value"], "bar": result["bar"], "holds": bool(result["holds"])} | result
        )
    except (ValueError, KeyError, TypeError):
        return Outcome(name, seconds, None, "its last line is no result")


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a benchmark: name, key figure, bar, verdict, seconds."""
    rows = [("benchmark", "figure", "bar", "", "seconds")]
    for outcome in outcomes:
        result = outcome.result or {}
        figure = f"{_short(result.get('value'))} {result.get('unit', '')}".strip()
        rows.append((outcome.name, figure, _short(result.get("bar")), outcome.verdict, f"{outcome.seconds:.0f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Entry point; 0 if every bar holds."""
    parser = argparse.ArgumentParser(description="Run every quick benchmark and print one table.")
    parser.add_argument("--only", default="", help="some of them, with commas: " + ", ".join(LIMITS))
    parser.add_argument("--scale-limits", type=float, default=1.0, help="factor on the time limits, for a slower machine")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(LIMITS)
    if unknown := [name for name in names if name not in LIMITS]:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(LIMITS)}")
    outcomes = []
    for name in names:
        outcomes.append(run_benchmark(name, LIMITS[name] * arguments.scale_limits))
        print(f"{name}: {outcomes[-1].verdict} ({outcomes[-1].seconds:.0f} s)", flush=True)
    print(table(outcomes))
    results = {outcome.name: outcome.result or {"reason": outcome.reason} for outcome in outcomes}
    met = sum(outcome.verdict == "met" for outcome in outcomes)
    print(
        json.dumps(
            {
                "name": "all", "value": met, "unit": f"of {len(outcomes)} benchmarks meet their bar", "bar": len(outcomes),
                "holds": met == len(outcomes), "cores": os.cpu_count(), "load": os.getloadavg()[0], "results": results,
            }
        )
    )  # fmt: skip
    return 0 if met == len(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
