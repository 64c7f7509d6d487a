"""Does fail-over lose or repeat anything? `python -m benchmarks.failover [--quick] [--kills N]`.

Emulated engines (the paper's 32B TP4 and 32B lengths), each a process of its own; real workers, manager, relay, trainer loop
and Redis; update mode `trajectory`. After a quiet spell a random living engine is killed with SIGKILL every `PAUSE_SECONDS`,
N times in all (200; `--quick`: 20); then comes another quiet spell. Time runs `TIME_FACTOR` times faster than in the real
engines, one emulated token stands for `TOKEN_SCALE` real ones, streams hear of `STREAM_TOKENS` of them at once.

Every trajectory that ends is compared with the answer that an engine in peace would have given (emulated answers are known
beforehand), and its tokens are counted as received: received less kept was sampled again. What an engine had sampled
and not streamed when it died cannot be counted from outside, nor can it be kept: of each running request up to
`STREAM_TOKENS`.

Value: trajectories lost or wrong, plus received tokens that were sampled again; bar: 0, and throughput in the last spell at
least 0.9 of the first.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulated_fleet import Fleet, running_fleet
from benchmarks.paper_fleet import MAX_NEW_TOKENS, TOKEN_SCALE, engine_flags, fleet_settings
from laminar.config.root import LaminarConfig
from laminar.errors import EngineError
from laminar.simulate.timings import load_lengths
from laminar.types import FinishReason, Int32Array, SamplingParameters, Segment, Trajectory
from rollout.engines.emulated_model import EmulatedModel
from rollout.engines.process import EngineProcess
from rollout.generation import Generation, Generator, OnSegment
from rollout.tiny import make_model

NUM_REPLICAS, GROUPS_EACH = 8, 6
TIME_FACTOR, STREAM_TOKENS = 8.0, 8
STEP_SECONDS = 8.0
PAUSE_SECONDS = 0.8
RECOVERY_BAR = 0.9


def settings(model: Path) -> LaminarConfig:
    """The run; each worker starts its engine, a process of its own."""
    return fleet_settings(
        model,
        time_factor=TIME_FACTOR,
        num_replicas=NUM_REPLICAS,
        groups_each=GROUPS_EACH,
        prompts_per_step=48,
        step_seconds=STEP_SECONDS,
        engine_options=engine_flags(time_factor=TIME_FACTOR, step_tokens=64, stream_tokens=STREAM_TOKENS),
        run={"seed": 11, "max_restarts": 10_000},
    )


class Listening:
    """A generator that counts the tokens that come from another."""

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self.received_tokens = 0

    async def generate(
        self, input_ids: Int32Array, sampling: SamplingParameters, request_id: str, on_segment: OnSegment | None = None, /
    ) -> Generation:
        """As the other's, counted once: what is streamed comes again in the whole answer."""
        heard = 0

        def hear(segment: Segment) -> None:
            nonlocal heard
            heard += len(segment)
            if on_segment is not None:
                on_segment(segment)

        try:
            generation = await self._engine.generate(
                input_ids, sampling, request_id, hear if on_segment is not None else None
            )
        except EngineError:
            self.received_tokens += heard
            raise
        self.received_tokens += max(heard, generation.num_tokens)
        return generation


@dataclass
class Judge:
    """What became of all trajectories."""

    model: EmulatedModel
    num_ended: int = 0
    num_failed: int = 0
    num_wrong: int = 0
    resampled_tokens: int = 0
    kept_tokens: int = 0
    ends: list[tuple[float, int]] = field(default_factory=list)

    def judge(self, trajectory: Trajectory, engine: Generator) -> None:
        """Compare one with what was to be expected."""
        if not isinstance(engine, Listening):
            return  # begun before anybody listened
        self.num_ended += 1
        self.resampled_tokens += engine.received_tokens - trajectory.num_sampled_tokens
        self.kept_tokens += trajectory.num_sampled_tokens
        self.ends.append((time.monotonic(), trajectory.num_sampled_tokens))
        if trajectory.failure is not None:
            self.num_failed += 1
        elif not self._is_right(trajectory):
            self.num_wrong += 1

    def _is_right(self, trajectory: Trajectory) -> bool:
        (chain,) = trajectory.chains
        ids, sampling = chain.token_ids(), trajectory.sampling
        num_prompt = len(chain.segments[0])
        key = self.model.key_of(sampling.seed, sampling.temperature, int(ids[0]))
        begin = num_prompt - self.model.num_drawn(ids[:num_prompt].tolist(), key)
        until = begin + self.model.answer_length(key, begin, sampling.temperature)
        count = max(1, min(until - num_prompt, MAX_NEW_TOKENS))
        positions = num_prompt + np.arange(count)
        expected = self.model.tokens(np.full(count, key), positions)
        expected[positions + 1 >= until] = self.model.end_id
        reason = FinishReason.STOP if until - num_prompt <= MAX_NEW_TOKENS else FinishReason.LENGTH
        return ids[num_prompt:].tolist() == expected.tolist() and trajectory.finish_reason is reason

    def tokens_per_second(self, since: float, until: float) -> float:
        """Of trajectories that ended in a time, in real tokens and engine seconds."""
        tokens = sum(count for when, count in self.ends if since <= when < until)
        return tokens * TOKEN_SCALE / (until - since) / TIME_FACTOR


async def kill_some(fleet: Fleet, num_kills: int, draw: random.Random) -> int:
    """Kill engines one after another; returns how many requests they were running, in all."""
    running = num_killed = 0
    while num_killed < num_kills:
        alive = [i for i in sorted(fleet.handles) if fleet.handles[i].returncode is None]
        if not alive:
            await asyncio.sleep(0.05)  # no event tells: processes start by themselves
            continue
        victim = draw.choice(alive)
        handle = fleet.handles[victim]
        assert isinstance(handle, EngineProcess)
        num_open = len(fleet.replicas[victim].berths.occupants)
        try:
            os.kill(handle.pid, signal.SIGKILL)
        except ProcessLookupError:
            await asyncio.sleep(0.05)  # the last kill's, whose end nobody has noticed yet
            continue
        num_killed, running = num_killed + 1, running + num_open
        await asyncio.sleep(PAUSE_SECONDS * draw.uniform(0.5, 1.5))
    return running


async def measure(num_kills: int, quiet_seconds: float) -> dict[str, Any]:
    """The whole of it."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        make_model(model)
        judge = Judge(EmulatedModel(model, load_lengths("32B_math", 1 / TOKEN_SCALE)))
        run_id = f"bench-{uuid.uuid4().hex[:8]}"
        async with running_fleet(settings(model), Path(folder) / run_id, run_id, None) as fleet:
            for player in fleet.players:
                player.around, player.on_end = Listening, judge.judge
            await asyncio.sleep(quiet_seconds / 2)  # the first answers begin together
            began = time.monotonic()
            await asyncio.sleep(quiet_seconds)
            killing = time.monotonic()
            running = await kill_some(fleet, num_kills, random.Random(5))
            async with asyncio.timeout(60):
                while any(replica.version is None for replica in fleet.replicas):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            recovered = time.monotonic()
            await asyncio.sleep(quiet_seconds)
            ended = time.monotonic()
            counters = await fleet.counters()
            restarts = sum(replica.restarts for replica in fleet.replicas)
        lost = counters.admitted - counters.running - counters.buffered - counters.taken - counters.trained
        before, after = judge.tokens_per_second(began, killing), judge.tokens_per_second(recovered, ended)
        bad = lost + judge.num_failed + judge.num_wrong
        return {
            "name": "failover", "value": bad + judge.resampled_tokens,
            "unit": "trajectories lost or wrong, and received tokens sampled again", "bar": 0,
            "holds": bad == 0 and judge.resampled_tokens == 0 and after >= RECOVERY_BAR * before and judge.num_ended > 0,
            "kills": num_kills, "engine_restarts": restarts, "lost": lost, "failed": judge.num_failed,
            "wrong": judge.num_wrong, "resampled_tokens": judge.resampled_tokens, "trajectories": judge.num_ended,
            "kept_tokens": judge.kept_tokens, "requests_on_killed_engines": running,
            "unstreamed_tail_at_most_tokens": running * STREAM_TOKENS, "tokens_per_second_before": before,
            "tokens_per_second_meanwhile": judge.tokens_per_second(killing, recovered), "tokens_per_second_after": after,
            "recovery": after / max(before, 1e-9), "recovery_bar": RECOVERY_BAR, "seconds_of_kills": recovered - killing,
            "time_factor": TIME_FACTOR, "token_scale": TOKEN_SCALE, "stream_tokens": STREAM_TOKENS,
            "replicas": NUM_REPLICAS, "cores": os.cpu_count(), "load": os.getloadavg()[0],
        }  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Does fail-over lose or repeat anything?")
    parser.add_argument("--quick", action="store_true", help="20 kills, within 55 s")
    parser.add_argument("--kills", type=int, help="how many")
    flags = parser.parse_args()
    num_kills = flags.kills or (20 if flags.quick else 200)
    print(json.dumps(asyncio.run(measure(num_kills, 8.0 if flags.quick else 20.0))))


if __name__ == "__main__":
    main()
