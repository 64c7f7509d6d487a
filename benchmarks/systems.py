"""Is asynchronous training worth it? `python -m benchmarks.systems [--quick]`.

The real system (workers, manager, relay, buffer, Redis, training loop) on emulated engines and an emulated trainer, with the
paper's 32B answer lengths and decode steps, as systems of 32 devices:

- `synchronous`: colocated. All 32 devices generate (8 engines), then all train; pure config: `max_staleness = 0`, and for
  every engine an equal share of the batch. Nobody pays for moving weights or for switching between the phases.
- `one_step`: 5 engines and 12 training devices (the best split, by the simulator), a batch generated while the last one is
  trained, with a barrier between batches: `max_staleness = 1`, and a gate of ours (`systems_run.keep_in_step`) that lets
  workers claim the next one, whole, when nothing is in flight.
- ours: 4 engines and 16 training devices, the paper's split, `max_staleness` 1, 4 and unbounded with update mode
  `trajectory` and repack, and unbounded with `in_flight`.

A step trains 48 prompts of 16 answers: each synchronous engine plays 96 at once, between the paper's runs on 256 GPUs (128)
and 512 GPUs (64). All systems have the same prompts and seeds, so the same lengths. Start-up and the first steps are not
counted.

Values: trained tokens/s of ours as the paper has it (`ours_unbounded`) over synchronous, bar 1.8; over one-step, bar 1.3;
the ratios of the other arms are told. CPU shares, lateness of the workers' event loop and lag of the engines say whether
this machine kept up with the clock; where it did not, the faster systems look slower than they are. The lock-step ones
begin 768 answers at once, which takes this process a second or two, and so look slower by that time the factor.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.systems_arm import System
from laminar.errors import DeadlineError, EngineError
from rollout.tiny import make_model

SYNCHRONOUS = System("synchronous", engines=8, training_devices=32, max_staleness=0)
ONE_STEP = System("one_step", engines=5, training_devices=12, max_staleness=1, in_step=True)
OURS = tuple(
    System(f"ours_{name}", engines=4, training_devices=16, max_staleness=bound, weight_update=mode, groups_each=16)
    for name, bound, mode in (
        ("k1", 1, "trajectory"), ("k4", 4, "trajectory"), ("unbounded", "unbounded", "trajectory"),
        ("unbounded_in_flight", "unbounded", "in_flight"),
    )
)  # fmt: skip
HEADLINE = "ours_unbounded"
QUICK = ("synchronous", "one_step", "ours_k1", HEADLINE)
BARS = {"synchronous": 1.8, "one_step": 1.3}
TIME_FACTOR = 5.0
COLUMNS = (
    "trained_tokens_per_second", "generated_tokens_per_second", "staleness_mean", "staleness_max", "engine_idle_share",
    "trainer_idle_share", "engines_cpu_share", "workers_cpu_share", "workers_late_share", "engines_lag_seconds",
)  # fmt: skip


def compare(arms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of medians to the two baselines, and whether the bars hold.

    Args:
        arms: measured, each system once or more.
    """
    speeds: dict[str, list[float]] = {}
    for arm in arms:
        speeds.setdefault(arm["system"], []).append(arm["trained_tokens_per_second"])
    median = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = {
        baseline: {name: round(speed / median[baseline], 2) for name, speed in median.items() if name.startswith("ours")}
        for baseline in BARS
    }
    paper = {baseline: found[HEADLINE] for baseline, found in ratios.items()}
    return {
        "name": "systems", "value": paper["synchronous"], "unit": "trained tokens/s, ours over synchronous",
        "bar": BARS["synchronous"], "holds": all(paper[baseline] >= bar for baseline, bar in BARS.items()),
        "over_one_step": paper["one_step"], "over_one_step_bar": BARS["one_step"], "ratios": ratios,
        "cores": os.cpu_count(), "load": os.getloadavg()[0], "arms": list(arms),
    }  # fmt: skip


def row(arm: dict[str, Any]) -> str:
    """One line of the table."""
    return f"{arm['system']:20}" + "".join(f"{arm[column]:>12.3g}" for column in COLUMNS)


async def measure_all(
    folder: Path, *, quick: bool, time_factor: float = TIME_FACTOR, names: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Measure every system, or those of the given names: once, or three times in alternating order.

    Args:
        folder: scratch.
        quick: once, and fewer steps.
        time_factor: real seconds in one of this machine.
        names: empty for all, or, if quick, for `QUICK`.
    """
    from benchmarks.systems_run import measure  # heavy: torch and DeepSpeed

    model = folder / "model"
    model.mkdir()
    make_model(model)
    chosen = names or (QUICK if quick else ())
    systems = [system for system in (SYNCHRONOUS, ONE_STEP, *OURS) if not chosen or system.name in chosen]
    rounds = [systems] if quick else [systems, systems[::-1], systems]
    arms = []
    print(f"{'':20}" + "".join(f"{column[:11]:>12}" for column in COLUMNS), flush=True)
    for system in [system for group in rounds for system in group]:
        warm_steps, steps = (2, 3) if system in OURS else (1, 2)
        if not quick:
            warm_steps, steps = (5, 8) if system in OURS else (1, 4)
        pace: dict[str, Any] = {"time_factor": time_factor, "warm_steps": warm_steps, "steps": steps}
        arm = await measure(system, model, folder, **pace)
        arms.append(arm | pace)
        print(row(arms[-1]), flush=True)
    return arms


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Is asynchronous training worth it?")
    parser.add_argument("--quick", action="store_true", help="four systems once, fewer steps: about twelve minutes")
    parser.add_argument("--time-factor", type=float, default=TIME_FACTOR, help="real seconds in one of this machine")
    parser.add_argument("--only", default="", help="systems, by name, with commas; then nothing is compared")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else ()
    try:
        with tempfile.TemporaryDirectory() as folder:
            arms = asyncio.run(
                measure_all(Path(folder), quick=arguments.quick, time_factor=arguments.time_factor, names=names)
            )
    except (EngineError, DeadlineError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(arms if names else compare(arms)))


if __name__ == "__main__":
    main()
