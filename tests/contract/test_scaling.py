"""`laminar scale`: the wanted number, and a crew that follows it."""

import asyncio

import pytest

from laminar.cluster.scaling import Scaling, change_wanted, wanted_key
from laminar.config.rollout import RolloutConfig
from laminar.errors import ConfigError, EnvironmentSetupError


class Crew:
    """Workers that run until they are retired; one that has no room fails to start."""

    def __init__(self, room=99):
        self.room, self.running, self.changed = room, {0, 1}, asyncio.Condition()
        self.num_managers = 0

    async def keep_manager(self):
        async with self.changed:
            self.num_managers += 1
            self.changed.notify_all()
        await asyncio.Event().wait()

    async def keep_worker(self, index):
        if index >= self.room:
            raise EnvironmentSetupError(f"Ray found no room for rollout-{index}")
        async with self.changed:
            self.running.add(index)
            self.changed.notify_all()
            await self.changed.wait_for(lambda: index not in self.running)

    async def retire_worker(self, index):
        async with self.changed:
            self.running.discard(index)
            self.changed.notify_all()


class Telemetry:
    async def emit(self, kind, metrics=None, *, fields=None):
        return None


@pytest.fixture
async def scaled(redis_client, run_id):
    tasks = []

    async def start(crew, **rollout):
        said = []
        config = RolloutConfig.model_validate({"num_workers": 2, **rollout})
        scaling = Scaling(redis_client, run_id, config, crew, Telemetry(), said.append)
        tasks.append(asyncio.create_task(scaling.run()))
        async with asyncio.timeout(20):
            while await redis_client.get(wanted_key(run_id)) is None:
                await asyncio.sleep(0.005)
        return said

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def follow(crew, wanted):
    async with asyncio.timeout(20), crew.changed:
        await crew.changed.wait_for(lambda: crew.running == wanted)


async def test_workers_come_and_go_with_the_wanted_number(redis_client, run_id, scaled):
    crew = Crew()
    await scaled(crew)
    assert await change_wanted(redis_client, run_id, "+2") == 4
    await follow(crew, {0, 1, 2, 3})
    assert await change_wanted(redis_client, run_id, "-1") == 3
    await follow(crew, {0, 1, 2})
    assert await change_wanted(redis_client, run_id, "1") == 1
    await follow(crew, {0})


async def managers(crew, number):
    async with asyncio.timeout(20), crew.changed:
        await crew.changed.wait_for(lambda: crew.num_managers == number)


async def test_the_manager_comes_with_the_second_worker_and_only_once(redis_client, run_id, scaled):
    crew = Crew()
    crew.running = {0}
    await scaled(crew, num_workers=1, weight_update="trajectory")
    assert crew.num_managers == 0
    await change_wanted(redis_client, run_id, "2")
    await managers(crew, 1)
    for wanted in ("1", "3"):
        await change_wanted(redis_client, run_id, wanted)
        await follow(crew, set(range(int(wanted))))
    assert crew.num_managers == 1


async def test_there_is_a_manager_from_the_start_where_replicas_drain(scaled):
    crew = Crew()
    await scaled(crew, weight_update="trajectory")
    await managers(crew, 1)


@pytest.mark.slow
async def test_there_is_no_manager_where_replicas_do_not_drain(redis_client, run_id, scaled):
    crew = Crew()
    await scaled(crew, weight_update="in_flight")
    await change_wanted(redis_client, run_id, "3")
    await follow(crew, {0, 1, 2})
    assert crew.num_managers == 0


async def test_a_worker_without_room_is_told_of_and_the_number_goes_back(redis_client, run_id, scaled):
    crew = Crew(room=3)
    said = await scaled(crew)
    await change_wanted(redis_client, run_id, "+2")
    async with asyncio.timeout(20):
        while int(await redis_client.get(wanted_key(run_id))) != 3:
            await asyncio.sleep(0.005)
    await follow(crew, {0, 1, 2})
    assert any("no further worker: Ray found no room for rollout-3" in text for text in said)


@pytest.mark.parametrize(
    ("text", "reason"), [("two", "no number"), ("-2", "would leave 0"), ("0", "no worker"), ("+", "no n")]
)
async def test_nonsense_and_less_than_one_worker_are_refused(redis_client, run_id, scaled, text, reason):
    await scaled(Crew())
    with pytest.raises(ConfigError, match=reason):
        await change_wanted(redis_client, run_id, text)
    assert int(await redis_client.get(wanted_key(run_id))) == 2
