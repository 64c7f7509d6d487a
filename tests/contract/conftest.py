"""Fixtures for tests that kill the data module's server, one of the test's own, and for those that train in this process."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from redis.asyncio import Redis

from laminar.experience.client import connect
from laminar.experience.server import EmbeddedServer

if TYPE_CHECKING:
    from trainer.ranks import Ranks


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A running server of this test's own; killed at the end, for nobody needs its data and an orderly end takes longer."""
    with EmbeddedServer(tmp_path / "redis") as running:
        yield running
        with contextlib.suppress(redis.RedisError):  # it is gone already
            kill_server(running)


@pytest.fixture
async def client(server: EmbeddedServer) -> AsyncIterator[Redis]:
    """A client of this test's own server."""
    connected = await connect(server.url)
    yield connected
    await connected.aclose()


@pytest.fixture
def append_only_file(tmp_path: Path) -> Callable[[], Path]:
    """The file to which this test's own server writes what it does."""

    def newest() -> Path:
        (log,) = (tmp_path / "redis" / "appendonlydir").glob("*.incr.aof")
        return log

    return newest


def kill_server(server: EmbeddedServer) -> None:
    """Kill a server, so that it neither says farewell nor writes."""
    with redis.Redis.from_url(server.url, socket_timeout=5) as probe:
        os.kill(int(probe.info("server")["process_id"]), signal.SIGKILL)
    server._process.wait(10)


@pytest.fixture
def kill() -> Callable[[EmbeddedServer], None]:
    """`kill_server`, for tests."""
    return kill_server


@pytest.fixture
def reboot(kill: Callable[[EmbeddedServer], None], append_only_file: Callable[[], Path]) -> Callable[..., None]:
    """Kill this test's own server and start it again, the last bytes of its append-only file lost."""

    def reboot_server(server: EmbeddedServer, lost_bytes: int = 0, kept_bytes: int | None = None) -> None:
        kill(server)
        with append_only_file().open("r+b") as log:
            size = append_only_file().stat().st_size
            log.truncate(max(0, size - lost_bytes) if kept_bytes is None else kept_bytes)
        server.start()

    return reboot_server


@pytest.fixture(scope="session")
def ranks() -> "Iterator[Ranks]":
    """This process as the only rank. DeepSpeed keeps the first process group it meets, so there is one for all tests."""
    import torch

    from trainer.ranks import join_ranks

    torch.set_num_threads(1)
    alone = join_ranks(0, 1)
    yield alone
    alone.leave()


@pytest.fixture(scope="session")
def run_two_ranks() -> Callable[..., None]:
    """Run a test file as two ranks: `FILE MODEL FOLDER PORT RANK`; both must end in order."""

    def run(program: str, model: Path, folder: Path, seconds: float = 240.0) -> None:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, 3, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
        command = [sys.executable, program, str(model), str(folder), str(store.port)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        children = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
        try:
            assert [child.wait(timeout=seconds) for child in children] == [0, 0]
        finally:
            for child in children:
                child.kill()

    return run
