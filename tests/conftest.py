"""Fixtures that several test files share: one bundled Valkey server a session, one run's keys a test."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from laminar.experience.client import connect
from laminar.experience.server import EmbeddedServer
from laminar.experience.store import ExperienceStore


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
