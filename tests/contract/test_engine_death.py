"""An engine that is killed in the middle of long answers: every trajectory goes on behind what had come."""

import asyncio
import contextlib
import os
import signal

import numpy as np
import pytest

from laminar.config.rollout import EngineConfig
from laminar.experience.partial import Partial, PartialPool
from laminar.seeds import trajectory_seed
from laminar.types import ClaimedGroup, FinishReason, SamplingParameters, WeightVersion
from rollout.engines.client import EngineClient
from rollout.engines.process import EngineLaunch, EngineProcess
from rollout.engines.tiny_model import write_tiny_model
from rollout.environments.single_turn import SingleTurn
from rollout.episode import play_episode
from rollout.recorder import PartialRecorder
from rollout.replica import Replica
from rollout.rewards.scorer import RewardScorer, Term

pytestmark = pytest.mark.e2e

V0 = WeightVersion(0, 0)
ANSWER_TOKENS = 200
NUM_MEMBERS = 6
PROMPT = np.asarray([5, 9, 17, 33], np.int32)


class FixedPrompt:
    """Token ids that stand for every text."""

    def encode(self, content):
        return PROMPT

    encode_observation = encode

    def decode(self, token_ids, *, keep_special=False):
        return " ".join(map(str, token_ids))


class OneVersion:
    """A puller that knows one folder of weights."""

    def __init__(self, folder):
        self.folder = folder

    def latest(self):
        return V0

    @contextlib.contextmanager
    def lease(self, version):
        yield self.folder


class CountingPool(PartialPool):
    """Knows how many tokens of each member were appended."""

    def __init__(self, store):
        super().__init__(store)
        self.appended = [0] * NUM_MEMBERS

    async def append(self, pieces):
        outcomes = await super().append(pieces)
        for piece in pieces:
            self.appended[piece.member] = piece.offset + sum(turn.num_tokens for turn in piece.turns)
        return outcomes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), vocabulary_size=8192, end_ids=(8191,))


@pytest.fixture
async def replica(model, tmp_path):
    async def start(path, version):
        launch = EngineLaunch(path, version, "secret", "r", tmp_path / "engine.log", max_running=8, max_cached_tokens=8192)
        process = EngineProcess(launch)
        return process, EngineClient(await process.start(60), token="secret", run_id="r", version=version)

    replica = Replica(EngineConfig(start_seconds=60), OneVersion(model), start)
    await replica.start()
    yield replica
    await replica.kill()


def play(engine, group, member, journal):
    return play_episode(
        group=group,
        member=member,
        attempt=0,
        engine=engine,
        make_environment=SingleTurn,
        scorer=RewardScorer([Term("one", lambda prompt, text: 1.0)]),
        tokenizer=FixedPrompt(),
        sampling=SamplingParameters(1.0, ANSWER_TOKENS, 0),
        run_seed=3,
        wall_seconds=120,
        journal=journal,
    )


async def keep_alive(replica):
    while True:
        if replica.problem():
            await replica.restart()
        await asyncio.sleep(0.01)


def recorder_of(pool):
    return PartialRecorder(pool, batch_tokens=16, is_resumable=True)


async def reference(replica, member):
    """The same answer from an engine that was left in peace."""
    sampling = SamplingParameters(1.0, ANSWER_TOKENS, trajectory_seed(3, f"00000000-{member:03d}", 0))
    return await replica.generate(PROMPT, sampling, "0" * 32)


async def until(condition):
    async with asyncio.timeout(40):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_killed_engine_costs_the_tail_only_and_doubles_no_token(replica, make_run, store):
    run = await make_run(store=store, group_size=NUM_MEMBERS, bytes_per_group=10**6)
    (group,) = (await run.claim("0.0", groups=1)).groups
    recorder = recorder_of(PartialPool(store))
    journals = [recorder.open(group, member, 0, None) for member in range(NUM_MEMBERS)]
    heard = [0] * NUM_MEMBERS
    for i, journal in enumerate(journals):
        inner = journal.note

        def note(segment, i=i, inner=inner):
            heard[i] += len(segment)
            inner(segment)

        journal.note = note
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(keep_alive(replica)), tasks.create_task(recorder.run())]
        episodes = [tasks.create_task(play(replica, group, member, journals[member])) for member in range(NUM_MEMBERS)]
        await until(lambda: min(heard) > 60)
        os.kill(replica._process.pid, signal.SIGKILL)
        trajectories = await asyncio.gather(*episodes)
        for task in background:
            task.cancel()
    assert replica.restarts == 1
    for member, trajectory in enumerate(trajectories):
        assert trajectory.failure is None
        (chain,) = trajectory.chains
        _prompt, *parts = chain.segments
        assert {part.version for part in parts} == {V0}
        assert len(parts) == 2  # before the death, and behind it
        assert trajectory.num_sampled_tokens == heard[member]  # what was heard is kept: nothing lost, nothing twice
        whole = await reference(replica, member)
        assert chain.token_ids()[len(PROMPT) :].tolist() == whole.token_ids().tolist()  # the noise goes on by position
        assert chain.rollout_logprobs()[len(PROMPT) :] == pytest.approx(whole.segments[0].logprobs, abs=1e-4)
        assert trajectory.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


async def test_a_dead_workers_trajectories_are_gone_on_with_by_the_next_owner(replica, make_run, store):
    run = await make_run(store=store, group_size=NUM_MEMBERS, bytes_per_group=10**6)
    (group,) = (await run.claim("0.0", groups=1, worker="dies")).groups
    pool = CountingPool(store)
    recorder = recorder_of(pool)
    async with asyncio.TaskGroup() as tasks:
        journals = [recorder.open(group, member, 0, None) for member in range(NUM_MEMBERS)]
        doomed = [tasks.create_task(play(replica, group, member, journals[member])) for member in range(NUM_MEMBERS)]
        doomed.append(tasks.create_task(recorder.run()))
        await until(lambda: min(pool.appended) > 60)
        for task in doomed:
            task.cancel()
    await run.pool.reap(ahead_seconds=3600)
    (heir,) = (await run.claim("0.0", groups=1, worker="heir")).groups
    assert isinstance(heir, ClaimedGroup)
    left = await recorder.adopt(heir)
    assert sorted(left) == list(range(NUM_MEMBERS))
    assert all(isinstance(partial, Partial) and partial.attempt == 0 for partial in left.values())
    journals = [recorder.open(heir, member, 0, left[member]) for member in range(NUM_MEMBERS)]
    trajectories = await asyncio.gather(*(play(replica, heir, member, journals[member]) for member in range(NUM_MEMBERS)))
    for member, trajectory in enumerate(trajectories):
        (chain,) = trajectory.chains
        whole = await reference(replica, member)
        kept = left[member].turns[0].segments[0]
        assert chain.token_ids()[len(PROMPT) :].tolist() == whole.token_ids().tolist()
        assert chain.segments[1].logprobs.tobytes() == kept.logprobs.tobytes()  # as received, by the first owner
        assert len(chain.segments) == 3
        assert journals[member].resumed_tokens == len(kept)
        assert await run.buffer.submit(trajectory, "heir") == "accepted"
    assert not await store.client.exists(store.key(f"partials:{group.group_id}"))
