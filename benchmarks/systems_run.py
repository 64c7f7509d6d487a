"""Runs one system of `benchmarks.systems` and measures it from step to step; holds the gate of the one in lock-step."""

import asyncio
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.emulated_fleet import Fleet, cpu_seconds, running_fleet
from benchmarks.systems_arm import (
    GROUP_SIZE,
    PROMPTS_PER_STEP,
    STEP_TOKENS,
    TOKEN_SCALE,
    System,
    generated,
    settings,
    trained,
)
from laminar.errors import DeadlineError
from laminar.experience.client import connect
from laminar.telemetry.stream import Event, TelemetryReader
from laminar.types import GroupState

LIMIT_SECONDS = 600.0
"""Of one system."""
POLL_SECONDS = 0.1
WATCH_SECONDS = 0.05
GATE_SECONDS = 0.02


@dataclass(slots=True)
class Steps:
    """What the trainer has told."""

    events: list[Event] = field(default_factory=list)

    async def read(self, reader: TelemetryReader) -> None:
        """Take in what is new."""
        while events := await reader.read():
            self.events += [event for event in events if event.kind == "step"]


class LoopWatch:
    """How late this process's event loop is: on a machine that keeps up, hardly."""

    def __init__(self) -> None:
        self.late_seconds = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            asked = time.monotonic() + WATCH_SECONDS
            await asyncio.sleep(WATCH_SECONDS)
            self.late_seconds += time.monotonic() - asked


async def measure(
    system: System, model: Path, folder: Path, *, time_factor: float, warm_steps: int, steps: int
) -> dict[str, Any]:
    """Run a system and measure it from the end of its step `warm_steps` to the end of the `steps` after it.

    Raises:
        DeadlineError: they do not end within `LIMIT_SECONDS`.
        EngineError: this machine does not keep up.
    """
    flags: dict[str, object] = {
        "latency": "32B_TP4", "lengths": "32B_math", "time-factor": time_factor,
        "token-scale": TOKEN_SCALE, "step-tokens": STEP_TOKENS, "stream-interval": STEP_TOKENS,
    }  # fmt: skip
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    async with running_fleet(settings(system, model, time_factor), folder / run_id, run_id, flags) as fleet:
        client = await connect(fleet.redis_url)
        gate = asyncio.create_task(keep_in_step(fleet)) if system.in_step else None
        watch = LoopWatch()
        watching = asyncio.create_task(watch.run())
        reader, told, deadline = TelemetryReader(client, run_id), Steps(), time.monotonic() + LIMIT_SECONDS
        await _wait_for_steps(told, reader, warm_steps, deadline, fleet)
        before = await _look(fleet, watch)
        await _wait_for_steps(told, reader, warm_steps + steps, deadline, fleet)
        after = await _look(fleet, watch)
        counters = await fleet.counters()
        watching.cancel()
        if gate is not None:
            gate.cancel()
        await client.aclose()
        window = told.events[warm_steps - 1 : warm_steps + steps]
        moved = 0 if fleet.manager is None else fleet.manager.tally.moved_trajectories
        return {
            "system": system.name,
            **trained(window, time_factor),
            **generated(before, after, system.engines, time_factor),
            "moved": moved,
            "evicted": counters.num_evicted,
            "failed": counters.num_failed,
            "outstanding_trajectories": counters.running + counters.buffered + counters.taken,
        }


async def keep_in_step(fleet: Fleet) -> None:
    """The barrier of a one-step system: the next batch is claimed when the last one is whole, all by the newest weights.

    With `max_staleness` 1 admission itself lets in no more than one batch beside the one that is trained, and none for an
    engine with older weights; so the gate has only to be shut once a batch is claimed, until none of it is in flight.
    """
    share, rest = divmod(PROMPTS_PER_STEP, len(fleet.workers))
    batch = 1
    for worker in fleet.workers:
        await worker.limit_in_flight(0)
    while True:
        snapshot = await fleet.buffer.peek()
        is_claimed = snapshot.counters.admitted >= batch * PROMPTS_PER_STEP * GROUP_SIZE
        if is_claimed and not any(header.state is GroupState.IN_FLIGHT for header in snapshot.headers):
            batch, is_claimed = batch + 1, False
        for index, worker in enumerate(fleet.workers):
            await worker.limit_in_flight(0 if is_claimed else share + (index < rest))
        await asyncio.sleep(GATE_SECONDS)


async def _wait_for_steps(told: Steps, reader: TelemetryReader, num_steps: int, deadline: float, fleet: Fleet) -> None:
    while len(told.events) < num_steps:
        fleet.check()
        if time.monotonic() > deadline:
            raise DeadlineError(f"step {num_steps} of {fleet.run_id} to end, after {len(told.events)}", LIMIT_SECONDS)
        await asyncio.sleep(POLL_SECONDS)
        await told.read(reader)


async def _look(fleet: Fleet, watch: LoopWatch) -> dict[str, Any]:
    states: Counter[str] = Counter()
    for replica in fleet.replicas:
        states.update(replica.clock.take()[0])
    told = await fleet.host.ask(ask=True)
    return told | {
        "at": time.monotonic(),
        "states": states,
        "workers_cpu_seconds": cpu_seconds(),
        "late_seconds": watch.late_seconds,
    }
