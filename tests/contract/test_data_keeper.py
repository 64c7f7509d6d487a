"""The supervisor's watch over the data module's server: restarts, budget, and putting a forgotten run back."""

import asyncio
import contextlib
from collections import Counter

import pytest
import redis

from laminar.cluster.data import RunData
from laminar.cluster.data_keeper import DataKeeper
from laminar.config.root import LaminarConfig
from laminar.errors import RunFailedError
from laminar.telemetry.stream import TelemetryWriter
from laminar.types import Prompt


@pytest.fixture
def keep(client):
    """Run a keeper while the test does its work; answers what was restarted and said."""

    @contextlib.asynccontextmanager
    async def kept(server, max_restarts=5):
        config = LaminarConfig.model_validate(
            {"run": {"max_restarts": max_restarts}, "model": {"path": "m"}, "data": {"path": "d"}}
        )
        data, restarts, said = RunData([Prompt(str(i), "p") for i in range(7)], []), Counter(), []
        telemetry = TelemetryWriter(client, "r", "supervisor")
        keeper = DataKeeper(server, client, data, "r", config, restarts, telemetry, said.append, check_seconds=0.005)
        task = asyncio.create_task(keeper.run())
        try:
            async with asyncio.timeout(60):
                yield restarts, said, task
        finally:
            while not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=0.5)

    return kept


async def eventually(condition):
    while True:
        with contextlib.suppress(redis.RedisError):
            if await condition():
                return
        await asyncio.sleep(0.02)


async def test_a_killed_server_comes_back_under_its_url_with_its_data(server, client, keep, kill):
    async with keep(server) as (restarts, said, _):
        await eventually(lambda: client.hlen("laminar:r:prompts"))
        await client.set("laminar:r:mark", "here")
        kill(server)
        await eventually(lambda: client.get("laminar:r:mark"))
        assert restarts == {"redis": 1}
        assert said == ["redis: the server ended; restarting it (1)"]


@pytest.mark.parametrize("forgotten", ["all", "prompts", "run"])
async def test_what_the_server_has_forgotten_is_put_back(server, client, keep, forgotten):
    async with keep(None):

        async def is_whole():
            return await client.hlen("laminar:r:prompts") == 7 and await client.hexists("laminar:r:run", "next_admission")

        await eventually(is_whole)
        await (client.flushall() if forgotten == "all" else client.delete(f"laminar:r:{forgotten}"))
        await eventually(is_whole)


async def test_a_server_that_dies_too_often_ends_the_run(server, keep, kill):
    async with keep(server, max_restarts=0) as (_, _, task):
        kill(server)
        with pytest.raises(RunFailedError, match="redis was restarted 0 times"):
            await task
