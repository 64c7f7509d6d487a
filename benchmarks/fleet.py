"""Does a replica work as well among 32 as among 4? `python -m benchmarks.fleet [--quick]`.

4, 8, 16 and 32 emulated replicas (`--quick`: 4 and 32) with the paper's 32B TP4 latencies and 32B lengths; real workers,
manager, relay, trainer loop and Redis; update mode `trajectory` with repack. The trainer is the same in every arm and
slower than the smallest fleet: a step of `STEP_SECONDS` on `PROMPTS_PER_STEP` groups, so that all fleets drain equally
often; an arm covers whole steps. Time runs `TIME_FACTOR` times faster than in the real engines, so 32 replicas load this
machine like `32 * TIME_FACTOR` real ones.

Value: generated tokens/s of each replica at the largest fleet over the smallest; bar: 0.9. CPU milliseconds of worker,
trainer loop, relay and manager for each second of the engines' time and each replica are told, as metered by role on the
event loop (`emulated_fleet.cpu_by_role`). `late_share` is how late this process's event loop wakes, of wall: on a busy
machine it says that the figures are the machine's.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.emulated_fleet import cpu_by_role, running_fleet
from benchmarks.paper_fleet import GROUP_SIZE, TOKEN_SCALE, engine_flags, fleet_settings
from laminar.config.root import LaminarConfig
from rollout.tiny import make_model

TIME_FACTOR, STREAM_TOKENS = 4.0, 16
GROUPS_EACH = 8
STEP_SECONDS, PROMPTS_PER_STEP = 40.0, 16
BAR = 0.9
LOOK_SECONDS = 0.25


def settings(model: Path, num_replicas: int) -> LaminarConfig:
    """The run."""
    return fleet_settings(
        model,
        time_factor=TIME_FACTOR,
        num_replicas=num_replicas,
        groups_each=GROUPS_EACH,
        prompts_per_step=PROMPTS_PER_STEP,
        step_seconds=STEP_SECONDS,
    )


async def measure_arm(model: Path, folder: Path, num_replicas: int, warm_seconds: float, seconds: float) -> dict[str, Any]:
    """One fleet: start, let the first answers pass, measure."""
    flags = engine_flags(time_factor=TIME_FACTOR, step_tokens=64, stream_tokens=STREAM_TOKENS)
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    with cpu_by_role() as spent:
        async with running_fleet(settings(model, num_replicas), folder / run_id, run_id, flags) as fleet:
            assert fleet.host is not None
            await fleet.wait_full(num_replicas * GROUPS_EACH * GROUP_SIZE)
            await asyncio.sleep(warm_seconds)
            before, spent_before, started = await fleet.host.ask(ask=True), dict(spent), time.monotonic()
            late = 0.0
            while (now := time.monotonic()) - started < seconds:
                await asyncio.sleep(LOOK_SECONDS)
                late += time.monotonic() - now - LOOK_SECONDS
            after, wall = await fleet.host.ask(ask=True), time.monotonic() - started
            cpu = {role: spent[role] - spent_before.get(role, 0.0) for role in sorted(spent)}
    engine_seconds = wall * TIME_FACTOR
    tokens = (after["generated_tokens"] - before["generated_tokens"]) * TOKEN_SCALE
    return {
        "replicas": num_replicas,
        "tokens_per_second_each": tokens / engine_seconds / num_replicas,
        "cpu_milliseconds_per_engine_second_and_replica": {
            role: round(seconds / engine_seconds / num_replicas * 1000, 3) for role, seconds in cpu.items()
        },
        "late_share": late / wall,
        "loop_busy_share": sum(cpu.values()) / wall,
        "engines_cpu_share": (after["cpu_seconds"] - before["cpu_seconds"]) / wall,
        "engines_lag_seconds": after["lag_seconds"] - before["lag_seconds"],
    }


def compare(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """The last line."""
    sizes = sorted({arm["replicas"] for arm in arms})
    each = {
        size: statistics.median(arm["tokens_per_second_each"] for arm in arms if arm["replicas"] == size) for size in sizes
    }
    ratio = each[sizes[-1]] / each[sizes[0]]
    unit = f"generated tokens/s of each replica, {sizes[-1]} over {sizes[0]} replicas"
    return {
        "name": "fleet", "value": round(ratio, 3), "unit": unit, "bar": BAR, "holds": ratio >= BAR,
        "tokens_per_second_each": each, "time_factor": TIME_FACTOR, "token_scale": TOKEN_SCALE,
        "stream_tokens": STREAM_TOKENS, "cores": os.cpu_count(), "load": os.getloadavg()[0], "arms": arms,
    }  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Does a replica work as well among 32 as among 4?")
    parser.add_argument("--quick", action="store_true", help="4 and 32 replicas, within 55 s")
    quick = parser.parse_args().quick
    order, warm, num_steps = ((4, 32), 3.0, 2) if quick else ((4, 8, 16, 32, 32, 16, 8, 4), 10.0, 4)
    arms = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        make_model(model)
        for num_replicas in order:
            arm = asyncio.run(measure_arm(model, Path(folder), num_replicas, warm, num_steps * STEP_SECONDS / TIME_FACTOR))
            print(arm, flush=True)
            arms.append(arm)
    print(json.dumps(compare(arms)))


if __name__ == "__main__":
    main()
