"""`laminar scale`: signed requests change the wanted number, and a crew follows it."""

import asyncio
from types import SimpleNamespace

import pytest

from laminar.cluster.control_desk import ControlDesk
from laminar.cluster.crew import Crew as RealCrew
from laminar.cluster.roles import RoleContext
from laminar.cluster.scaling import Scaling, wanted_number
from laminar.config.rollout import RolloutConfig
from laminar.config.root import LaminarConfig
from laminar.control import Request, Verb, ask
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
        if index >= self.room:
            raise EnvironmentSetupError(f"Ray found no room for rollout-{index}")

    async def retire_worker(self, index):
        async with self.changed:
            self.running.discard(index)
            self.changed.notify_all()


class Telemetry:
    async def emit(self, kind, metrics=None, *, fields=None):
        return None


@pytest.fixture
async def scaled():
    """Start following with a crew of two; gives the scaling and what it said."""
    tasks = []

    def start(crew, free=(99.0, 0.0), noted=None, **rollout):
        said, noted = [], [] if noted is None else noted
        config = RolloutConfig.model_validate({"num_workers": 2, **rollout})
        scaling = Scaling(config, crew, Telemetry(), said.append, noted.append, lambda: free)
        tasks.append(asyncio.create_task(scaling.run()))
        return scaling, said

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def follow(crew, wanted):
    async with asyncio.timeout(20), crew.changed:
        await crew.changed.wait_for(lambda: crew.running == wanted)


async def test_workers_come_and_go_with_the_wanted_number(scaled):
    crew = Crew()
    scaling, _ = scaled(crew)
    assert await scaling.change({"rollouts": "+2"}) == "2 -> 4 rollout workers wanted"
    await follow(crew, {0, 1, 2, 3})
    assert await scaling.change({"rollouts": "-1"}) == "4 -> 3 rollout workers wanted"
    await follow(crew, {0, 1, 2})
    await scaling.change({"rollouts": "1"})
    await follow(crew, {0})


async def managers(crew, number):
    async with asyncio.timeout(20), crew.changed:
        await crew.changed.wait_for(lambda: crew.num_managers == number)


async def test_the_manager_comes_with_the_second_worker_and_only_once(scaled):
    crew = Crew()
    crew.running = {0}
    scaling, _ = scaled(crew, num_workers=1, weight_update="trajectory")
    assert crew.num_managers == 0
    await scaling.change({"rollouts": "2"})
    await managers(crew, 1)
    for wanted in ("1", "3"):
        await scaling.change({"rollouts": wanted})
        await follow(crew, set(range(int(wanted))))
    assert crew.num_managers == 1


async def test_there_is_a_manager_from_the_start_where_replicas_drain(scaled):
    crew = Crew()
    scaled(crew, weight_update="trajectory")
    await managers(crew, 1)


@pytest.mark.slow
async def test_there_is_no_manager_where_replicas_do_not_drain(scaled):
    crew = Crew()
    scaling, _ = scaled(crew, weight_update="in_flight")
    await scaling.change({"rollouts": "3"})
    await follow(crew, {0, 1, 2})
    assert crew.num_managers == 0


async def test_a_worker_without_room_is_told_of_and_the_number_goes_back(scaled):
    crew, noted = Crew(room=3), []
    scaling, said = scaled(crew, noted=noted)
    await scaling.change({"rollouts": "+2"})
    await follow(crew, {0, 1, 2})
    async with asyncio.timeout(20):
        while scaling.wanted != 3:
            await asyncio.sleep(0.005)
    assert any("no further worker: Ray found no room for rollout-3" in text for text in said)
    assert noted == [4, 3]
    assert await scaling.change({"rollouts": "+1"}) == "3 -> 4 rollout workers wanted"


@pytest.mark.parametrize(
    ("change", "num_gpus", "free", "lack"),
    [
        ("+2", 0, (2.0, 0.0), ""),
        ("-1", 0, (-3.0, 0.0), ""),
        ("52", 0, (1.0, 0.0), ": they want 50 more cores and 1 are free; they slow each other, or wait for room"),
        ("+1", 0, (-2.0, 0.0), ": they want 1 more cores and 0 are free; they slow each other, or wait for room"),
        ("+3", 2, (99.0, 4.0), ": they want 6 more GPUs and 4 are free; what Ray cannot place in time is given up"),
    ],
)
async def test_who_asks_for_more_workers_than_there_is_room_for_is_told_so(scaled, change, num_gpus, free, lack):
    scaling, _ = scaled(Crew(), free=free, engine={"num_gpus": num_gpus})
    assert (await scaling.change({"rollouts": change})).partition("wanted")[2] == lack


@pytest.mark.parametrize(
    ("text", "reason"),
    [("two", "no number"), ("-2", "would leave 0"), ("0", "would leave 0")]
    + [(text, "no number") for text in ("+", "", "+-1", "--1", "\N{SUPERSCRIPT TWO}", "9" * 5000)],
)
def test_nonsense_and_less_than_one_worker_are_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        wanted_number(text, 2)


async def test_a_request_scales_only_if_the_runs_token_signed_it(redis_client, run_id, scaled):
    scaling, _ = scaled(Crew())
    desk = ControlDesk(redis_client, run_id, "secret", {Verb.SCALE: scaling.change}, Telemetry(), lambda text: None)
    serving = asyncio.create_task(desk.run())
    with pytest.raises(ConfigError, match="not signed with the run's token"):
        await ask(redis_client, run_id, Request.make("guess", Verb.SCALE, {"rollouts": "+1"}, "test"))
    assert scaling.wanted == 2
    text = await ask(redis_client, run_id, Request.make("secret", Verb.SCALE, {"rollouts": "+1"}, "test"))
    assert (text, scaling.wanted) == ("2 -> 3 rollout workers wanted", 3)
    serving.cancel()
    await asyncio.wait([serving])


class Process:
    """A worker's process whose start takes until it is let in."""

    made = []

    def __init__(self, spec, context, config):
        self.spec, self.pid, self.node_id, self.state = spec, 1, "node", "made"
        self.letting_in, self.ended = asyncio.Event(), asyncio.Event()
        self.made.append(self)

    async def place(self, seconds):
        self.state = "placed"

    async def start(self, seconds):
        await self.letting_in.wait()

    async def call(self, method, *arguments):
        if method == "run":
            self.state = "runs"
            await self.ended.wait()
        else:
            self.ended.set()

    def kill(self):
        self.state = "killed"


async def settled(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_worker_that_is_still_starting_is_retired_too_and_its_number_is_free_again(scaled, monkeypatch, tmp_path):
    monkeypatch.setattr("laminar.cluster.crew.RoleProcess", Process)
    monkeypatch.setattr(Process, "made", [])
    config = LaminarConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"num_workers": 1}})
    pids = {}
    crew = RealCrew(config, RoleContext("supervisor", "run", "token", "", tmp_path), Telemetry(), print, pids.__setitem__)
    monkeypatch.setattr(crew, "_relays", SimpleNamespace(need=Telemetry().emit))
    scaling, said = scaled(crew, num_workers=1, weight_update="in_flight")

    def states():
        return [(process.spec.name, process.state) for process in Process.made]

    for lives in (1, 2):
        await scaling.change({"rollouts": "+1"})
        await settled(lambda lives=lives: states()[lives - 1 :] == [("rollout-1", "placed")])
        await scaling.change({"rollouts": "-1"})
        await settled(lambda lives=lives: said[2 * lives - 1 :] == ["scaled to 1 rollout workers"])
        assert states() == [("rollout-1", "killed")] * lives
    await scaling.change({"rollouts": "+1"})
    await settled(lambda: len(Process.made) == 3)
    Process.made[2].letting_in.set()
    await settled(lambda: states()[2] == ("rollout-1", "runs"))
    assert pids == {"rollout-1": 1}
    await scaling.change({"rollouts": "-1"})
    await settled(lambda: states()[2] == ("rollout-1", "killed"))
    await settled(lambda: pids == {"rollout-1": None})


async def test_a_number_that_was_lost_in_the_middle_is_the_next_one_to_come(scaled):
    crew = Crew()
    scaling, _ = scaled(crew)
    await scaling.change({"rollouts": "4"})
    await follow(crew, {0, 1, 2, 3})
    crew.room = 0
    async with crew.changed:  # worker 2 ends, and there is no room for its next life
        crew.running.discard(2)
        crew.changed.notify_all()
    await settled(lambda: scaling.wanted == 3)
    crew.room = 99
    await scaling.change({"rollouts": "+1"})
    await follow(crew, {0, 1, 2, 3})
    await scaling.change({"rollouts": "-1"})
    await follow(crew, {0, 1, 2})
