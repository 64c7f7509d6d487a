"""Fixtures that several test files share: one bundled Valkey server a session, one run's keys a test."""

import dataclasses
import gc
import resource
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from laminar.experience.answers import Claim
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.prompts import PromptPool
from laminar.experience.server import EmbeddedServer
from laminar.experience.store import ExperienceStore
from laminar.types import (
    Chain,
    ClaimedGroup,
    Failure,
    FailureKind,
    FinishReason,
    Prompt,
    Purpose,
    SamplingParameters,
    Trajectory,
    WeightVersion,
    given,
    sampled,
    trajectory_id,
)


def pytest_collection() -> None:
    """Importing torch and its like makes millions of objects and no garbage; to look for some takes a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is imported stays, so nobody looks through it again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A running server with its data in a temporary folder."""
    folder: Path = tmp_path_factory.mktemp("valkey")
    with EmbeddedServer(folder) as server:
        yield server


@pytest.fixture
def run_id() -> str:
    """A run that no other test knows."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def redis_client(valkey: EmbeddedServer) -> AsyncIterator[Redis]:
    """A client of the session's server, in this test's event loop."""
    client = await connect(valkey.url)
    yield client
    await client.aclose()


@pytest.fixture
def store(redis_client: Redis, run_id: str) -> ExperienceStore:
    """One run's data, empty at first."""
    return ExperienceStore(redis_client, run_id)


@dataclass(frozen=True)
class Run:
    """A configured run: its two halves, and short ways to drive them."""

    store: ExperienceStore
    pool: PromptPool
    buffer: ExperienceBuffer

    async def claim(self, engine: str = "0.0", groups: int = 1000, worker: str = "w", lease_seconds: float = 60.0) -> Claim:
        return await self.pool.claim(worker, WeightVersion.parse(engine), groups, lease_seconds)

    async def ready(self, engine: str = "0.0", groups: int = 1000) -> list[str]:
        """Claim groups and submit all their members, sampled by that version."""
        return await self.finish((await self.claim(engine, groups)).groups, engine)

    async def finish(self, groups: Sequence[ClaimedGroup], engine: str) -> list[str]:
        """Submit all members of claimed groups."""
        trajectories = [play(group.group_id, member, engine) for group in groups for member in group.members]
        assert set(await self.buffer.submit_many(trajectories, "w")) <= {"accepted"}
        return [group.group_id for group in groups]

    async def step(self, step: int, group_ids: Sequence[str], lineage: int = 0) -> None:
        await self.buffer.take(lineage, step, group_ids)
        await self.buffer.publish(lineage, step)
        await self.buffer.ack(lineage, step)


def play(group_id: str, member: int, *versions: str, reward: float = 1.0, attempt: int = 1) -> Trajectory:
    """A finished trajectory with three tokens of each version."""
    sampled_segments = [sampled([7, 8, 9], [-0.5, -0.25, -1.0], WeightVersion.parse(text)) for text in versions]
    return Trajectory(
        trajectory_id=trajectory_id(group_id, member),
        group_id=group_id,
        prompt_id="",
        member=member,
        attempt=attempt,
        purpose=Purpose.TRAIN,
        sampling=SamplingParameters(temperature=1.0, max_new_tokens=8, seed=attempt),
        chains=(Chain((given([1, 2]), *sampled_segments)),),
        finish_reason=FinishReason.STOP,
        reward=reward,
    )


def break_down(group_id: str, member: int, kind: FailureKind = FailureKind.TIMEOUT) -> Trajectory:
    """A trajectory that failed before its first token."""
    return dataclasses.replace(
        play(group_id, member, "0.0"), chains=(), reward=None, finish_reason=None, failure=Failure(kind, "took too long")
    )


@pytest.fixture
def trajectory_maker() -> SimpleNamespace:
    """`play` and `break_down`: finished and failed trajectories."""
    return SimpleNamespace(play=play, break_down=break_down)


@pytest.fixture
def make_run(redis_client: Redis) -> Callable[..., Awaitable[Run]]:
    """Make a run with settings of the test's choice: a new one, or that of the given store."""

    async def make(
        num_prompts: int = 100,
        *,
        opened: bool = True,
        store: ExperienceStore | None = None,
        memory_seconds: float = 10.0,
        **settings: Any,
    ) -> Run:
        store = store or ExperienceStore(redis_client, f"test-{uuid.uuid4().hex[:12]}")
        run = Run(store, PromptPool(store), ExperienceBuffer(store, memory_seconds=memory_seconds))
        defaults = {
            "prompts_per_step": 2,
            "group_size": 1,
            "max_staleness": 2,
            "max_attempts": 3,
            "min_group_size": 1,
            "max_bytes": 10**9,
            "bytes_per_group": 1000,
            "max_epochs": None,
            "data_seed": 0,
            "shuffle": False,
        }
        await run.pool.configure(num_prompts=num_prompts, **(defaults | settings))
        await run.pool.add_prompts([Prompt(str(i), f"prompt {i}") for i in range(num_prompts)])
        if opened:
            await run.buffer.restore(0, 0)
        return run

    return make


@pytest.fixture
def disk_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Within it this process can write no file beyond so many bytes: what fits is written, the rest is an OSError."""

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit
