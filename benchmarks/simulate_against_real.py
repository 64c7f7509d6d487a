"""Is the simulator right about the real system? `python -m benchmarks.simulate_against_real [--quick] [--arms FILE]`.

The systems of `benchmarks.systems` are measured (or taken from the last line of such a run, `--arms`) and simulated, from
the same numbers: engines, lengths, trainer, bounds, update modes, warm-up and measured steps. The real run's tokens come in
steps of 256 and its lengths are its own draws, so the simulated figure is the mean over `SEEDS` draws.

Values: the greatest relative error of trained tokens/s over all systems, bar 0.10; of mean staleness, in versions, bar 0.2.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.systems import ONE_STEP, OURS, SYNCHRONOUS
from benchmarks.systems_arm import (
    CACHED_TOKENS,
    DEVICES_PER_ENGINE,
    GROUP_SIZE,
    MAX_NEW_TOKENS,
    PROMPTS_PER_STEP,
    TRAINED_TOKENS_PER_DEVICE_SECOND,
    System,
    settings,
)
from laminar.policies.repack import RepackLimits
from laminar.simulate.cluster import Cluster, Engine, Trainer
from laminar.simulate.simulation import simulate
from laminar.simulate.system import Repack
from laminar.simulate.system import System as SimulatedSystem
from laminar.simulate.timings import load_lengths, load_step_times
from laminar.simulate.workload import Workload

SEEDS = 5
SPEED_BAR, STALENESS_BAR = 0.10, 0.2
KINDS = {"synchronous": "synchronous", "one_step": "one_step"}


def simulated(system: System, *, time_factor: float, warm_steps: int, steps: int) -> dict[str, float]:
    """Trained tokens/s and mean staleness of a system, by the simulator.

    Args:
        system: of `benchmarks.systems`.
        time_factor: of the real run: what it does by its own clock happens so much later in the engines' time.
        warm_steps: not measured.
        steps: measured.
    """
    config = settings(system, Path("model"), time_factor).rollout
    repack = None
    if config.wants_manager(config.num_workers):
        limits = RepackLimits(config.repack.kv_high, config.repack.kv_limit, 512, config.engine.max_running)
        repack = Repack(limits, config.repack.interval_seconds * time_factor)
    workload = Workload(load_lengths("32B_math"), 0, MAX_NEW_TOKENS, GROUP_SIZE, PROMPTS_PER_STEP)
    engine = Engine(load_step_times("32B_TP4"), DEVICES_PER_ENGINE, CACHED_TOKENS, config.engine.max_running)
    trainer = Trainer(system.training_devices, TRAINED_TOKENS_PER_DEVICE_SECOND)
    rules = SimulatedSystem(
        kind=KINDS.get(system.name, "laminar"),  # type: ignore[arg-type]
        weight_update=system.weight_update,
        repack=repack,
        max_staleness=None if system.max_staleness == "unbounded" else system.max_staleness,
        max_hold_seconds=config.max_hold_seconds * time_factor,
        max_in_flight_groups=system.most_groups_each,
        adapt_in_flight=config.adapt_in_flight,
    )
    outcomes = [
        simulate(
            workload,
            Cluster(engine, system.engines, trainer),
            rules,
            seed=seed,
            num_steps=warm_steps + steps,
            warm_steps=warm_steps,
        )
        for seed in range(SEEDS)
    ]
    return {
        "tokens_per_second": statistics.fmean(outcome.tokens_per_second for outcome in outcomes),
        "mean_staleness": statistics.fmean(outcome.mean_staleness for outcome in outcomes),
    }


def compare(arms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Simulated beside measured, system by system.

    Args:
        arms: measured ones of `benchmarks.systems`.
    """
    by_name = {system.name: system for system in (SYNCHRONOUS, ONE_STEP, *OURS)}
    rows = {}
    for arm in arms:
        pace = {"time_factor": arm["time_factor"], "warm_steps": arm["warm_steps"], "steps": arm["steps"]}
        guess = simulated(by_name[arm["system"]], **pace)
        rows[arm["system"]] = {
            "measured_tokens_per_second": round(arm["trained_tokens_per_second"]),
            "simulated_tokens_per_second": round(guess["tokens_per_second"]),
            "speed_error": round(guess["tokens_per_second"] / arm["trained_tokens_per_second"] - 1, 3),
            "measured_staleness": round(arm["staleness_mean"], 2),
            "simulated_staleness": round(guess["mean_staleness"], 2),
            "staleness_error": round(guess["mean_staleness"] - arm["staleness_mean"], 2),
        }
    speed = max(abs(row["speed_error"]) for row in rows.values())
    staleness = max(abs(row["staleness_error"]) for row in rows.values())
    return {
        "name": "simulate_against_real", "value": speed, "unit": "greatest error of trained tokens/s", "bar": SPEED_BAR,
        "holds": speed <= SPEED_BAR and staleness <= STALENESS_BAR, "staleness_error": staleness,
        "staleness_bar": STALENESS_BAR, "cores": os.cpu_count(), "load": os.getloadavg()[0], "systems": rows,
    }  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Is the simulator right about the real system?")
    parser.add_argument("--quick", action="store_true", help="four systems once: about twelve minutes")
    parser.add_argument("--arms", type=Path, help="output of `benchmarks.systems`, whose last line is used")
    arguments = parser.parse_args()
    if arguments.arms:
        told = json.loads(arguments.arms.read_text().strip().splitlines()[-1])
        arms = told["arms"] if isinstance(told, dict) else told
    else:
        from benchmarks.systems import measure_all

        with tempfile.TemporaryDirectory() as folder:
            arms = asyncio.run(measure_all(Path(folder), quick=arguments.quick))
    result = compare(arms)
    for name, row in result["systems"].items():
        print(name, row, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
