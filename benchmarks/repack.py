"""Does repack pay? `python -m benchmarks.repack [--quick]`.

16 emulated replicas with the paper's 32B TP4 decode latencies and 32B answer lengths; real workers, manager, relay, trainer
loop (emulated steps) and Redis; update mode `trajectory`. Pairs of arms, repack off and on, first the one, then the other;
the two of a pair have the same prompts, seed and so lengths, every pair others. Time runs `TIME_FACTOR` times faster than in
the real engines; one emulated token stands for `TOKEN_SCALE` real ones; requests come, go and end at the exact emulated
token, and streams hear of `STREAM_TOKENS` of them at once. Values are in real tokens and real engine seconds. Start-up is
not counted, nor is the time until long answers end: a fleet that began at one moment has no tails at first.

Value: generated tokens/s on over off. Bar: 1.20, with mean key-value use up, mean and maximum trajectory latency at most 3
% worse, CPU for planning and moving below 1 % of wall, and 1,000 replicas planned in less than 50 ms of CPU. All are means
over the pairs. Latency is compared over the trajectories that ended in both arms of a pair, the same prompts and lengths; as
measured it includes what this machine adds, times the time factor. One pair's maximum is one answer's luck: single arms of
one setting differ by 5 %. A move's CPU is measured apart (`benchmarks.move_cost`), and everything that planning and moving
cost in all 17 processes is divided by the wall time of the engines, since moves come as often as engine time passes; by this
machine's own, shorter wall it is told as well. The engines' lag and the workers' late share (of wall: how late the event
loop wakes) tell how far the machine kept up; with a lag figures are low.
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

from benchmarks.emulated_fleet import cpu_seconds, running_fleet
from benchmarks.move_cost import measure_moves
from benchmarks.paper_fleet import GROUP_SIZE, TOKEN_SCALE, engine_flags, fleet_settings
from laminar.config.root import LaminarConfig
from laminar.policies.repack import RepackLimits, ReplicaLoad, plan_repack
from laminar.types import WeightVersion
from rollout.tiny import make_model

NUM_REPLICAS, GROUPS_EACH = 16, 12
TIME_FACTOR, STREAM_TOKENS = 6.0, 8
CAPACITY_TOKENS, CROWDED_TOKENS = 130_000, 3_600
"""Room for a full replica's answers, so that nothing is preempted in either arm: with 80,000 preemption made one pair's
maximum differ from another's by 6 %. What bounds a destination then is how much it may slow its longest trajectories."""
PROMPTS_PER_REPLICA = 6
"""Groups of a step, for each replica: half of what is in flight."""
STEP_SECONDS = 28.0
LOOK_SECONDS = 0.25
BAR = 1.20
PLAN_BAR_MILLISECONDS = 50


def settings(model: Path, *, repack: bool, seed: int, time_factor: float, num_replicas: int) -> LaminarConfig:
    """The run."""
    return fleet_settings(
        model,
        time_factor=time_factor,
        num_replicas=num_replicas,
        groups_each=GROUPS_EACH,
        prompts_per_step=PROMPTS_PER_REPLICA * num_replicas,
        step_seconds=STEP_SECONDS,
        max_running=GROUP_SIZE * GROUPS_EACH,  # a destination's steps are no slower than a full replica's
        capacity_tokens=CAPACITY_TOKENS,
        repack=repack,
        crowded_tokens=CROWDED_TOKENS,
        run={"seed": seed},
    )


async def measure_arm(
    model: Path,
    folder: Path,
    *,
    repack: bool,
    seed: int,
    warm_seconds: float,
    seconds: float,
    time_factor: float,
    num_replicas: int,
) -> dict[str, Any]:
    """One arm: start, let the first versions pass, measure."""
    flags = engine_flags(time_factor=time_factor, step_tokens=16, stream_tokens=STREAM_TOKENS)
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    config = settings(model, repack=repack, seed=seed, time_factor=time_factor, num_replicas=num_replicas)
    async with running_fleet(config, folder / run_id, run_id, flags) as fleet:
        assert fleet.host is not None
        await fleet.wait_full(num_replicas * GROUPS_EACH * GROUP_SIZE)
        await asyncio.sleep(warm_seconds)
        before, cpu_before, started = await fleet.host.ask(ask=True), cpu_seconds(), time.monotonic()
        shares: list[float] = []
        late = 0.0
        while (now := time.monotonic()) - started < seconds:
            await asyncio.sleep(LOOK_SECONDS)
            late += time.monotonic() - now - LOOK_SECONDS
            shares += (await fleet.host.ask(ask=True))["used_share"]
        wall = time.monotonic() - started
        after = await fleet.host.ask(ask=True)
        latencies = {name: value * time_factor for name, value in fleet.latencies().items()}
        tally = None if fleet.manager is None else fleet.manager.tally
        numbers = [replica.version.number for replica in fleet.replicas if replica.version is not None]
        return {
            "repack": repack,
            "seed": seed,
            "tokens_per_second": (after["generated_tokens"] - before["generated_tokens"]) * TOKEN_SCALE / wall / time_factor,
            "kv_use": statistics.fmean(shares),
            "latency_mean_seconds": statistics.fmean(latencies.values()),
            "latency_max_seconds": max(latencies.values()),
            "num_trajectories": len(latencies),
            "latencies": latencies,
            "newest_version": max(numbers, default=-1),
            "preempted": after["preempted"],
            "engines_cpu_share": (after["cpu_seconds"] - before["cpu_seconds"]) / wall,
            "engines_lag_seconds": after["lag_seconds"] - before["lag_seconds"],
            "workers_late_share": late / wall,
            "workers_cpu_share": (cpu_seconds() - cpu_before) / wall,
            "wall_seconds": warm_seconds + wall,
            "plan_cpu_seconds": 0.0 if tally is None else tally.plan_seconds,
            "moved": 0 if tally is None else tally.moved_trajectories,
            "released": 0 if tally is None else tally.released_replicas,
            "failed_moves": 0 if tally is None else tally.failed_moves,
        }


def plan_milliseconds(num_replicas: int = 1000) -> float:
    """Median CPU time of one plan for a fleet of random loads."""
    import random

    draw = random.Random(0)
    loads = [
        ReplicaLoad(
            f"r{i}",
            WeightVersion(0, 0),
            int(draw.random() ** 3 * 90_000),
            100_000,
            draw.randint(1, 40),
            0,
            0,
            draw.randint(1, 20_000),
        )
        for i in range(num_replicas)
    ]
    idle = {load.replica for load in loads}
    times = []
    for _ in range(9):
        started = time.thread_time()
        plan_repack(loads, idle, WeightVersion(0, 1), RepackLimits(0.8, 0.95, 512, 256, CROWDED_TOKENS))
        times.append((time.thread_time() - started) * 1000)
    return statistics.median(times)


def paired_latencies(off: dict[str, Any], on: dict[str, Any]) -> tuple[float, float, int]:
    """Mean and maximum latency, on over off, of the trajectories that ended in both arms; and how many those are."""
    names = off["latencies"].keys() & on["latencies"].keys()
    before, after = ([arm["latencies"][name] for name in names] for arm in (off, on))
    return statistics.fmean(after) / statistics.fmean(before), max(after) / max(before), len(names)


def compare(arms: list[dict[str, Any]], moving: dict[str, Any], time_factor: float, num_replicas: int) -> dict[str, Any]:
    """The last line: means of the pairs' ratios, and whether the bars hold."""
    pairs = [
        tuple(next(arm for arm in arms if arm["seed"] == seed and arm["repack"] is repack) for repack in (False, True))
        for seed in dict.fromkeys(arm["seed"] for arm in arms)
    ]
    ratio = {
        name: statistics.fmean(on[name] / off[name] for off, on in pairs)
        for name in ("tokens_per_second", "kv_use", "latency_mean_seconds", "latency_max_seconds")
    }
    found = [paired_latencies(off, on) for off, on in pairs]
    mean, maximum = (statistics.fmean(pair[place] for pair in found) for place in (0, 1))
    plan = plan_milliseconds()
    own_share = statistics.fmean(
        (on["plan_cpu_seconds"] + on["moved"] * moving["move_cpu_milliseconds"] / 1000) / on["wall_seconds"]
        for _, on in pairs
    )
    share = own_share / time_factor
    holds = (
        ratio["tokens_per_second"] >= BAR
        and ratio["kv_use"] > 1
        and max(mean, maximum) <= 1.03
        and share < 0.01
        and plan < PLAN_BAR_MILLISECONDS
    )
    return {
        "name": "repack", "value": round(ratio["tokens_per_second"], 3), "unit": "generated tokens/s, on over off",
        "bar": BAR, "holds": holds, "kv_use_ratio": round(ratio["kv_use"], 3),
        "latency_mean_ratio": round(mean, 3), "latency_max_ratio": round(maximum, 3),
        "num_paired": sum(pair[2] for pair in found),
        "latency_max_ratio_of_each_pair": [round(pair[1], 3) for pair in found],
        "latency_mean_ratio_unpaired": round(ratio["latency_mean_seconds"], 3),
        "latency_max_ratio_unpaired": round(ratio["latency_max_seconds"], 3),
        "plan_and_move_cpu_share": share, "plan_and_move_cpu_share_of_this_machines_wall": own_share, "moving": moving,
        "plan_1000_replicas_ms": round(plan, 1), "replicas": num_replicas, "time_factor": time_factor,
        "token_scale": TOKEN_SCALE, "stream_tokens": STREAM_TOKENS, "cores": os.cpu_count(), "load": os.getloadavg()[0],
        "arms": [told(arm) for arm in arms],
    }  # fmt: skip


def told(arm: dict[str, Any]) -> dict[str, Any]:
    """An arm without its single latencies, rounded."""
    return {
        name: round(value, 4) if isinstance(value, float) else value for name, value in arm.items() if name != "latencies"
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Does repack pay?")
    parser.add_argument("--quick", action="store_true", help="two short pairs instead of three, within seven minutes")
    parser.add_argument(
        "--time-factor", type=float, default=TIME_FACTOR, help="lower for a busy machine, with more --seconds"
    )
    parser.add_argument("--seconds", type=float, help="of one arm")
    parser.add_argument("--replicas", type=int, default=NUM_REPLICAS, help="fewer for a busy machine")
    flags = parser.parse_args()
    order = [(False, 7), (True, 7), (True, 8), (False, 8), (False, 9), (True, 9)]
    order, warm, seconds = (order[:4], 25.0, 60.0) if flags.quick else (order, 40.0, 100.0)
    seconds, pace = flags.seconds or seconds, flags.time_factor
    arms = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        make_model(model)
        for repack, seed in order:
            arm = asyncio.run(
                measure_arm(
                    model,
                    Path(folder),
                    repack=repack,
                    seed=seed,
                    warm_seconds=warm,
                    seconds=seconds,
                    time_factor=pace,
                    num_replicas=flags.replicas,
                )
            )
            print(told(arm), flush=True)
            arms.append(arm)
        moving = asyncio.run(measure_moves(model, Path(folder)))
    print(json.dumps(compare(arms, moving, pace, flags.replicas)))


if __name__ == "__main__":
    main()
