"""How fast is the data module? `python -m benchmarks.buffer [--quick] [--peer-python PATH]`.

Trajectories of 200 and of 16,000 tokens go from 1 and from 4 producer processes through submit, take, fetch and ack, over
the bundled Valkey (unix socket, append-only file on). Wall seconds from the first submit to the last ack; start-up and
claims are not counted, encoding and decoding are. Side by side in one run, order alternated, medians:

- bare: the same bytes by pipelined XADD and XREAD on the same server, nothing else done with them. Bar: 0.5x of it for
  16,000 tokens, 0.2x for 200.
- pickle: one XADD a trajectory, pickled, no pipeline; read one by one. Bar: ahead.
- peer: TransferQueue 0.1.11 (kv_batch_put, kv_batch_get, kv_clear), put by one client, since its clients are Ray drivers or
  actors. Needs an interpreter that has it (`--peer-python`); left out, and said so, without. Bar: ahead.
- flat: milliseconds a 200-token trajectory with 1,000 and with 100,000 (--quick: 20,000) others buffered, by turns on two
  servers. Bar: within 20 %.
- fetch (full mode only): a batch of 8,192 trajectories of 16,000 tokens, taken, and read by 1, 2 and 4 ranks at once.

CPU microseconds a trajectory, of all processes together, are reported too: other load on the machine hardly moves them.
The printed value is the worst ratio to its bar over all bars that were measured.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.buffer_peer import measure_peer
from benchmarks.buffer_sides import GROUP_SIZE, Cost, Producers, Side, make_trajectory, run_bare, run_ours, run_pickle
from laminar.allocator import exempt_from_collection, keep_freed_memory
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.prompts import PromptPool
from laminar.experience.server import EmbeddedServer
from laminar.experience.store import ExperienceStore
from laminar.types import GroupState, Prompt, Trajectory, WeightVersion

SIDES: dict[str, Side] = {"ours": run_ours, "bare": run_bare, "pickle": run_pickle}
BARS = {"bare_200": 0.2, "bare_16000": 0.5, "pickle": 1.0, "peer": 1.0}
FLAT_BAR = 1.2
FLAT_STEPS = 8
WINDOW = 1024
"""Trajectories in one step of the flatness measurement."""
LARGE_BATCH = 8192
"""Trajectories in the batch of the fetch measurement."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    counts: dict[int, int]
    repeats: int
    most_buffered: int
    deadline_seconds: float
    """No further repeat of a length and number of producers begins after so long."""


QUICK = Plan({200: 4096, 16_000: 384}, 3, 20_000, 5.0)
FULL = Plan({200: 16_384, 16_000: 1024}, 5, 100_000, 1e9)


def measure_sides(server: EmbeddedServer, plan: Plan) -> dict[str, dict[str, float]]:
    """Trajectories a second of every side, length and number of producers."""
    figures: dict[str, dict[str, float]] = {}
    with Producers(4) as producers:
        for num_tokens, count in plan.counts.items():
            for num_producers in (1, 4):
                deadline = time.perf_counter() + plan.deadline_seconds
                costs: dict[str, list[Cost]] = {name: [] for name in SIDES}
                for repeat in range(plan.repeats):
                    if repeat and time.perf_counter() > deadline:
                        break
                    for name in list(SIDES) if repeat % 2 == 0 else reversed(SIDES):
                        costs[name].append(SIDES[name](server.url, producers, num_producers, num_tokens, count))
                rates = {name: count / statistics.median(cost.wall for cost in some) for name, some in costs.items()}
                processor = {name: statistics.median(cost.processor for cost in some) for name, some in costs.items()}
                figures[f"{num_tokens}x{num_producers}"] = rates | {
                    "ours_megabytes_per_second": rates["ours"] * num_tokens * 8 / 1e6,
                    "runs": len(costs["ours"]),
                    **{f"{name}_processor_microseconds": value / count * 1e6 for name, value in processor.items()},
                }
                print(f"{num_tokens}x{num_producers}", {k: round(v, 1) for k, v in rates.items()}, flush=True)
    return figures


@dataclass(frozen=True)
class Filled:
    """A run with many groups claimed, some of which are submitted."""

    buffer: ExperienceBuffer
    groups: list[str]

    def made(self, first: int, count: int, num_tokens: int) -> list[Trajectory]:
        """Trajectories of the groups from place `first` on."""
        ids = self.groups[first : first + count // GROUP_SIZE]
        return [make_trajectory(group, member, num_tokens) for group in ids for member in range(GROUP_SIZE)]

    async def submit(self, first: int, count: int, num_tokens: int) -> None:
        """Play groups from place `first` on."""
        for start in range(0, count, 64):
            await self.buffer.submit_many(self.made(first + start // GROUP_SIZE, 64, num_tokens), "w")

    async def step(self, step: int) -> None:
        """Take, read and let go the oldest ready groups."""
        headers = (await self.buffer.peek()).headers
        ready = [header.group_id for header in headers if header.state is GroupState.READY][: WINDOW // GROUP_SIZE]
        await self.buffer.take(0, step, ready)
        await self.buffer.fetch(ready)
        await self.buffer.publish(0, step)
        await self.buffer.ack(0, step)


async def claimed_run(store: ExperienceStore, num_groups: int) -> Filled:
    """A run that holds that many claimed groups."""
    pool, buffer = PromptPool(store), ExperienceBuffer(store)
    await pool.configure(
        num_prompts=1, prompts_per_step=1, group_size=GROUP_SIZE, max_staleness=None, max_attempts=1, min_group_size=1,
        max_bytes=1 << 50, bytes_per_group=1, max_epochs=None, data_seed=0, shuffle=False,
    )  # fmt: skip
    await pool.add_prompts([Prompt("0", "")])
    await buffer.restore(0, 0)
    groups: list[str] = []
    while len(groups) < num_groups:
        claim = await pool.claim("w", WeightVersion(0, 0), min(500, num_groups - len(groups)), 3600)
        groups += [group.group_id for group in claim.groups]
    return Filled(buffer, groups)


async def measure_flatness(urls: Sequence[str], levels: Sequence[int]) -> dict[str, float]:
    """Milliseconds a 200-token trajectory, through a whole step, with so many others buffered; medians of steps in turn.

    Each level has a server of its own.
    """
    clients = [await connect(url) for url in urls]
    runs = []
    for client, level in zip(clients, levels, strict=True):
        run = await claimed_run(ExperienceStore(client, "flat"), (level + (FLAT_STEPS + 1) * WINDOW) // GROUP_SIZE)
        await run.submit(0, level, 200)
        runs.append(run)
    samples: dict[int, list[float]] = {level: [] for level in levels}
    for step in range(1, FLAT_STEPS + 2):
        for run, level in list(zip(runs, levels, strict=True))[:: 1 if step % 2 else -1]:
            window = run.made(level // GROUP_SIZE + (step - 1) * WINDOW // GROUP_SIZE, WINDOW, 200)
            started = time.perf_counter()
            for first in range(0, WINDOW, 64):
                await run.buffer.submit_many(window[first : first + 64], "w")
            await run.step(step)
            samples[level].append(time.perf_counter() - started)
    for client in clients:
        await client.aclose()
    # The first step reads all headers, as a trainer does that has just started.
    return {str(level): statistics.median(some[1:]) * 1000 / WINDOW for level, some in samples.items()}


async def measure_fetch(url: str) -> dict[str, float]:
    """Megabytes a second when ranks read a batch of trajectories of 16,000 tokens, each its share; and how it got there."""
    client = await connect(url)
    run = await claimed_run(ExperienceStore(client, "fetch"), LARGE_BATCH // GROUP_SIZE)
    started = time.perf_counter()
    await run.submit(0, LARGE_BATCH, 16_000)
    submitted = time.perf_counter()
    await run.buffer.take(0, 1, run.groups)
    figures = {"submit_seconds": submitted - started, "take_seconds": time.perf_counter() - submitted}
    for ranks in (1, 2, 4):
        processes = []
        started = time.perf_counter()
        for rank in range(ranks):
            share = run.groups[rank::ranks]
            processes.append(await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.buffer_sides", url, "fetch", *share, stdout=asyncio.subprocess.PIPE
            ))  # fmt: skip
        seconds = [float((await process.communicate())[0]) for process in processes]
        figures[str(ranks)] = LARGE_BATCH * 16_000 * 8 / 1e6 / max(seconds)
        figures[f"{ranks}_with_start_up_seconds"] = time.perf_counter() - started
    started = time.perf_counter()
    await run.buffer.publish(0, 1)
    await run.buffer.ack(0, 1)
    figures["publish_and_ack_seconds"] = time.perf_counter() - started
    await client.aclose()
    return figures


def judge(sides: dict[str, dict[str, float]], peer: dict[str, float] | None, flat: dict[str, float]) -> dict[str, float]:
    """Each measured figure over its bar; 1 or more holds."""
    margins = {}
    for name, rates in sides.items():
        length = name.partition("x")[0]
        margins[f"bare_{name}"] = rates["ours"] / rates["bare"] / BARS[f"bare_{length}"]
        margins[f"pickle_{name}"] = rates["ours"] / rates["pickle"] / BARS["pickle"]
        if peer is not None and name.endswith("x1"):
            margins[f"peer_{length}"] = rates["ours"] / peer[length] / BARS["peer"]
    costs = list(flat.values())
    margins["flat"] = FLAT_BAR / (costs[-1] / costs[0])
    return margins


def main() -> int:
    """Print one JSON line last; exit code 0 whatever the outcome."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="end within 55 s")
    parser.add_argument("--peer-python", default="", help="an interpreter that has TransferQueue 0.1.11")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    keep_freed_memory()
    exempt_from_collection()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder, EmbeddedServer(Path(folder)) as server:
        sides = measure_sides(server, plan)
        with EmbeddedServer(Path(folder) / "second") as second:
            flat = asyncio.run(measure_flatness((server.url, second.url), (1000, plan.most_buffered)))
        print("flat", flat, flush=True)
        fetch = None if options.quick else asyncio.run(measure_fetch(server.url))
    peer = measure_peer(options.peer_python, plan.counts, seconds=20.0 if options.quick else 300.0)
    margins = judge(sides, peer, flat)
    result: dict[str, Any] = {
        "name": "buffer",
        "value": round(min(margins.values()), 3),
        "unit": "worst figure over its bar",
        "bar": 1.0,
        "holds": min(margins.values()) >= 1.0,
        "bars": BARS | {"flat": FLAT_BAR},
        "margins": {name: round(margin, 3) for name, margin in margins.items()},
        "trajectories_per_second": sides,
        "peer_trajectories_per_second": peer,
        "flat_milliseconds": flat,
        "fetch_megabytes_per_second": fetch,
        "not_measured": [] if peer else ["peer: no interpreter with TransferQueue 0.1.11 (--peer-python)"],
        "seconds": round(time.perf_counter() - started, 1),
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "threads": 1},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
