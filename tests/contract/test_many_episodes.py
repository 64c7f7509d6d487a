"""Two hundred episodes at once whose environments sleep, hang, raise, answer nonsense or die: each ends, nothing is left."""

import asyncio
import gc
import random
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from laminar.types import ClaimedGroup, FailureKind, FinishReason, Prompt, SamplingParameters
from rollout.environments.base import Observation, StepResult
from rollout.episode import play_episode
from rollout.rewards.scorer import RewardScorer, Term
from rollout.scripted import CodePointTokenizer, ScriptedEngine

NUM_EPISODES = 200
WALL_SECONDS = 2.0
WAYS = ("good", "sleeps", "hangs", "raises", "nonsense", "dies", "swallows", "exits")
EXPECTED = {
    "good": None,
    "sleeps": None,
    "hangs": FailureKind.TIMEOUT,
    "raises": FailureKind.ENVIRONMENT,
    "nonsense": FailureKind.USER_BUG,
    "dies": FailureKind.ENVIRONMENT,
    "swallows": FailureKind.TIMEOUT,
    "exits": FailureKind.ENVIRONMENT,
}
MARK = "laminar-test-of-many-episodes"


class World:
    """Two turns; trouble comes in the one that chance says."""

    def __init__(self, way, draw, release):
        self.way, self.trouble, self.turn, self.release = way, draw.randint(1, 2), 0, release
        self.process = None

    async def reset(self, prompt):
        if self.way == "dies":
            code = "import sys; sys.stdin.readline()"
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", code, MARK, stdin=asyncio.subprocess.PIPE
            )
        return Observation("?")

    async def step(self, completion):
        self.turn += 1
        if self.turn == self.trouble and (answer := await self.trouble_of(self.way)) is not None:
            return answer
        return StepResult(done=self.turn == 2, observation=Observation("again"))

    async def trouble_of(self, way):
        if way == "sleeps":
            await asyncio.sleep(0.05)
        elif way == "hangs":
            await asyncio.Event().wait()
        elif way == "raises":
            raise RuntimeError("the browser is gone")
        elif way == "nonsense":
            return {"reward": 1}
        elif way == "dies":
            self.process.kill()
            await self.process.wait()
            self.process.stdin.write(b"x" * 100_000)
            await self.process.stdin.drain()
        elif way == "swallows":
            while not self.release.is_set():
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    continue
        elif way == "exits":
            raise SystemExit(3)
        return None

    async def close(self):
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


async def play(way, index, release):
    return await play_episode(
        group=ClaimedGroup(str(index), index, Prompt("p", "?"), (0,), 0),
        member=0,
        attempt=0,
        engine=ScriptedEngine(["a", "b"]),
        make_environment=lambda: World(way, random.Random(index), release),
        scorer=RewardScorer([Term("one", lambda prompt, text: 1.0)]),
        tokenizer=CodePointTokenizer(),
        sampling=SamplingParameters(1.0, 10, 0),
        run_seed=0,
        wall_seconds=WALL_SECONDS if EXPECTED[way] is FailureKind.TIMEOUT else 60.0,
    )


async def play_all():
    release = asyncio.Event()
    ways = [WAYS[index % len(WAYS)] for index in range(NUM_EPISODES)]
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        tasks = [group.create_task(play(way, index, release)) for index, way in enumerate(ways)]
    release.set()
    while len(asyncio.all_tasks()) > 1:  # abandoned ones end now
        await asyncio.sleep(0)
    return ways, [task.result() for task in tasks]


def processes():
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and MARK.encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
async def test_every_one_of_two_hundred_episodes_ends_with_the_right_reason_and_leaves_nothing():
    threads = threading.active_count()
    for _ in range(2):  # what is made once, such as caches, is made now
        await play_all()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(3):
        ways, trajectories = await play_all()
        for way, trajectory in zip(ways, trajectories, strict=True):
            assert (trajectory.failure and trajectory.failure.kind) == EXPECTED[way], (way, trajectory.failure)
            assert (trajectory.reward is None) == (EXPECTED[way] is not None)
            assert (trajectory.finish_reason is FinishReason.WALL_TIME) == (EXPECTED[way] is FailureKind.TIMEOUT)
        assert Counter(ways)["dies"] == NUM_EPISODES // len(WAYS)
        del trajectories
    gc.collect()
    assert len(gc.get_objects()) < before + NUM_EPISODES  # not even one object an episode is kept
    assert processes() == []
    assert threading.active_count() <= threads + 4
