"""The sides that `benchmarks.buffer` compares: producer processes, and the consumer in the calling process.

A side is a function of (url, producers, how many of them, tokens, trajectories) that returns what it took. `python -m
benchmarks.buffer_sides URL RUN GROUP...` is one rank that reads its share of a batch and prints the seconds.
"""

import asyncio
import multiprocessing
import pickle
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import redis

from laminar.allocator import exempt_from_collection, keep_freed_memory
from laminar.codec import encode_trajectory
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.prompts import PromptPool
from laminar.experience.store import ExperienceStore
from laminar.types import (
    Chain,
    FinishReason,
    GroupState,
    Prompt,
    Purpose,
    SamplingParameters,
    Trajectory,
    Turn,
    WeightVersion,
    given,
    sampled,
    trajectory_id,
)

GROUP_SIZE = 8
SUBMIT_AT_ONCE = 64
PIPELINE = 50
POLL_SECONDS = 0.01


def make_trajectory(group_id: str, member: int, num_tokens: int) -> Trajectory:
    """A fifth of it prompt; ids and log-probs of no regularity."""
    noise = np.random.default_rng(member)
    ids = noise.integers(0, 150_000, num_tokens, np.int32)
    logprobs = -noise.random(num_tokens, np.float32)
    prompt = num_tokens // 5
    return Trajectory(
        trajectory_id=trajectory_id(group_id, member),
        group_id=group_id,
        prompt_id="prompt",
        member=member,
        attempt=0,
        purpose=Purpose.TRAIN,
        sampling=SamplingParameters(1.0, num_tokens, 1),
        chains=(Chain((given(ids[:prompt]), sampled(ids[prompt:], logprobs[prompt:], WeightVersion(0, 0)))),),
        finish_reason=FinishReason.STOP,
        reward=1.0,
        reward_terms={"term": 1.0},
        turns=(Turn(0, prompt, num_tokens, FinishReason.STOP),),
        worker="rollout-0",
    )


class Producers:
    """Processes that wait for work; what they need is made before the clock runs."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def prepare(self, work: str, shares: list[tuple[Any, ...]]) -> None:
        """Give each process its share, and wait until all are ready."""
        self._busy = self._pipes[: len(shares)]
        for pipe, share in zip(self._busy, shares, strict=True):
            pipe.send((work, share))
        for pipe in self._busy:
            pipe.recv()

    def go(self) -> None:
        """Let them start."""
        for pipe in self._busy:
            pipe.send("go")

    def join(self) -> float:
        """Wait until all have ended; the seconds of CPU that they took."""
        return sum(float(pipe.recv()) for pipe in self._busy)

    def __enter__(self) -> "Producers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.terminate()
            process.join(5)


@dataclass(frozen=True)
class Cost:
    """Seconds by the clock, and of CPU of all processes together, the server's included."""

    wall: float
    processor: float


Side = Callable[[str, Producers, int, int, int], Cost]


class Meter:
    """Measures from its making to `stop`."""

    def __init__(self, url: str) -> None:
        self._server = redis.Redis.from_url(url)
        self._server_start, self._start, self._wall = self._server_seconds(), time.process_time(), time.perf_counter()

    def _server_seconds(self) -> float:
        usage: Any = self._server.info("cpu")
        return float(usage["used_cpu_user"] + usage["used_cpu_sys"])

    def stop(self, producers: Producers) -> Cost:
        """The cost so far."""
        wall, own = time.perf_counter() - self._wall, time.process_time() - self._start
        return Cost(wall, own + producers.join() + self._server_seconds() - self._server_start)


def run_ours(url: str, producers: Producers, num_producers: int, num_tokens: int, count: int) -> Cost:
    """Submit, take, fetch, publish, ack."""
    return asyncio.run(_consume_ours(url, producers, num_producers, num_tokens, count))


async def _consume_ours(url: str, producers: Producers, num_producers: int, num_tokens: int, count: int) -> Cost:
    client, run_id = await connect(url), uuid.uuid4().hex[:8]
    store = ExperienceStore(client, run_id)
    pool, buffer = PromptPool(store), ExperienceBuffer(store)
    num_groups = count // GROUP_SIZE
    batch = num_groups // 8
    await pool.configure(
        num_prompts=1, prompts_per_step=batch, group_size=GROUP_SIZE, max_staleness=None, max_attempts=1, min_group_size=1,
        max_bytes=1 << 50, bytes_per_group=1 << 20, max_epochs=None, data_seed=0, shuffle=False,
    )  # fmt: skip
    await pool.add_prompts([Prompt("0", "")])
    await buffer.restore(0, 0)
    groups: list[str] = []
    while len(groups) < num_groups:
        claim = await pool.claim("w", WeightVersion(0, 0), num_groups - len(groups), 3600)
        groups += [group.group_id for group in claim.groups]
    producers.prepare("ours", [(url, run_id, groups[i::num_producers], num_tokens) for i in range(num_producers)])
    meter = Meter(url)
    producers.go()
    left, step = num_groups, 0
    while left:
        headers = (await buffer.peek()).headers
        ready = [header.group_id for header in headers if header.state is GroupState.READY][:batch]
        if len(ready) < min(batch, left):
            await asyncio.sleep(POLL_SECONDS)
            continue
        step += 1
        await buffer.take(0, step, ready)
        members = await buffer.fetch(ready)
        assert sum(map(len, members)) == len(ready) * GROUP_SIZE
        await buffer.publish(0, step)
        await buffer.ack(0, step)
        left -= len(ready)
    cost = meter.stop(producers)
    await client.aclose()
    return cost


def run_bare(url: str, producers: Producers, num_producers: int, num_tokens: int, count: int) -> Cost:
    """Pipelined XADD of frames made before; XREAD of as many as are there; nothing decoded."""
    return _consume_stream(url, producers, num_producers, num_tokens, count, "bare", PIPELINE)


def run_pickle(url: str, producers: Producers, num_producers: int, num_tokens: int, count: int) -> Cost:
    """One XADD a trajectory, pickled; XREAD one by one, unpickled, deleted."""
    return _consume_stream(url, producers, num_producers, num_tokens, count, "pickle", 1)


def _consume_stream(
    url: str, producers: Producers, num_producers: int, num_tokens: int, count: int, work: str, at_once: int
) -> Cost:
    client, key = redis.Redis.from_url(url), f"stream:{uuid.uuid4().hex}"
    share = count // num_producers
    producers.prepare(work, [(url, key, share, num_tokens) for _ in range(num_producers)])
    meter = Meter(url)
    producers.go()
    seen, last = 0, "0"
    while seen < share * num_producers:
        answer: Any = client.xread({key: last}, count=at_once, block=1000)
        for row_id, fields in answer[0][1] if answer else ():
            if work == "pickle":
                pickle.loads(fields[b"p"])
                client.xdel(key, row_id)
            seen, last = seen + 1, row_id
    cost = meter.stop(producers)
    client.delete(key)
    client.close()
    return cost


def _serve(pipe: Connection) -> None:
    """A producer process."""
    keep_freed_memory()
    exempt_from_collection()
    works = {"ours": _produce_ours, "bare": _produce_bare, "pickle": _produce_pickle}
    while True:
        work, share = pipe.recv()
        pipe.send(works[work](pipe, *share))


def _wait(pipe: Connection) -> float:
    """Say that everything is made, wait for the start; this process's CPU seconds then."""
    pipe.send("ready")
    pipe.recv()
    return time.process_time()


def _produce_ours(pipe: Connection, url: str, run_id: str, groups: list[str], num_tokens: int) -> float:
    trajectories = [make_trajectory(group, member, num_tokens) for group in groups for member in range(GROUP_SIZE)]

    async def produce() -> float:
        client = await connect(url)
        buffer = ExperienceBuffer(ExperienceStore(client, run_id))
        start = _wait(pipe)
        for first in range(0, len(trajectories), SUBMIT_AT_ONCE):
            await buffer.submit_many(trajectories[first : first + SUBMIT_AT_ONCE], "w")
        seconds = time.process_time() - start
        await client.aclose()
        return seconds

    return asyncio.run(produce())


def _produce_bare(pipe: Connection, url: str, key: str, count: int, num_tokens: int) -> float:
    frames = [encode_trajectory(make_trajectory("00000000", place % GROUP_SIZE, num_tokens)) for place in range(count)]
    client = redis.Redis.from_url(url)
    client.ping()
    start = _wait(pipe)
    for first in range(0, count, PIPELINE):
        with client.pipeline(transaction=False) as pipeline:
            for frame in frames[first : first + PIPELINE]:
                pipeline.xadd(key, {"p": frame})
            pipeline.execute()
    return time.process_time() - start


def _produce_pickle(pipe: Connection, url: str, key: str, count: int, num_tokens: int) -> float:
    trajectories = [make_trajectory("00000000", place % GROUP_SIZE, num_tokens) for place in range(count)]
    client = redis.Redis.from_url(url)
    client.ping()
    start = _wait(pipe)
    for trajectory in trajectories:
        client.xadd(key, {"p": pickle.dumps(trajectory)})
    return time.process_time() - start


async def _read_share(url: str, run_id: str, groups: list[str]) -> float:
    keep_freed_memory()
    exempt_from_collection()
    client = await connect(url)
    started = time.perf_counter()
    await ExperienceBuffer(ExperienceStore(client, run_id)).fetch(groups)
    seconds = time.perf_counter() - started
    await client.aclose()
    return seconds


if __name__ == "__main__":
    print(asyncio.run(_read_share(sys.argv[1], sys.argv[2], sys.argv[3:])))
