"""A worker on a real server: case D17, group failures, and work that is let go is aborted in the engine at once.

The engine process and the relay are scripted; worker, replica, episodes and the data module are the real ones.
"""

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.directory import ReplicaDirectory, ReplicaEntry
from laminar.errors import DeadlineError, RunFailedError
from laminar.trajectories import TrajectoryFolder
from laminar.types import (
    EvictionReason,
    Failure,
    FailureKind,
    FinishReason,
    GroupState,
    SamplingParameters,
    WeightVersion,
    sampled,
)
from rollout.engines.wire import EngineLoad
from rollout.environments.base import Observation, StepResult
from rollout.episode import play_episode
from rollout.generation import Generation
from rollout.player import sampling_for
from rollout.quarantine import RejectedWeightsError
from rollout.replica import Replica
from rollout.rewards.scorer import RewardScorer
from rollout.scripted import CodePointTokenizer
from rollout.trajectory_log import TrajectoryLog
from rollout.verification import Check, Verdict
from rollout.worker import RolloutWorker, first_attempt
from trainer.sampling import BatchSource

pytestmark = pytest.mark.heavy

FIRST = WeightVersion(0, 0)


class Engine:
    """Process and client in one: answers "4", or hangs until it is aborted where the prompt says so."""

    returncode = None

    def __init__(self):
        self.running, self.aborted, self.hang = {}, [], set()

    async def generate(self, input_ids, sampling, request_id, on_segment=None):
        prompt = "".join(map(chr, input_ids))
        if prompt in self.hang:
            self.running[request_id] = prompt
            await asyncio.Event().wait()
        return Generation((sampled([52], [-1.0], FIRST),), FinishReason.STOP)

    async def abort(self, request_id):
        self.aborted.append(self.running.pop(request_id))

    async def health(self):
        return None

    async def loads(self):
        return EngineLoad(0, 0, 0, 1, 0)

    async def kill(self):
        return None

    close = kill


class Relay:
    """A puller with one version, for ever."""

    def latest(self):
        return FIRST

    @contextlib.contextmanager
    def lease(self, version):
        yield Path()

    async def wait_newer(self, than, seconds):
        await asyncio.sleep(seconds)
        raise DeadlineError("a newer version", seconds)


class World:
    """One turn. `troubles` maps a prompt to what its next episodes do instead: an error to raise, or "hang"."""

    def __init__(self, troubles, played):
        self.troubles, self.played = troubles, played

    async def reset(self, prompt):
        self.played[prompt.prompt_id] += 1
        trouble = self.troubles.get(prompt.prompt_id)
        if trouble:
            trouble = trouble.pop(0)
            if trouble == "hang":
                await asyncio.Event().wait()
            raise trouble
        return Observation(prompt.content)

    async def step(self, completion):
        return StepResult(done=True, reward_terms={"right": 1.0})

    async def close(self):
        return None


class Player:
    """Plays real episodes in such worlds."""

    def __init__(self, troubles, wall_seconds):
        self.troubles, self.wall_seconds, self.played = troubles, wall_seconds, Counter()
        self.judge = None

    def judge_of(self, group):
        return self.judge

    async def close(self):
        return None

    async def play(self, engine, group, member, attempt, purpose, journal=None):
        return await play_episode(
            group=group,
            member=member,
            attempt=attempt,
            engine=engine,
            make_environment=lambda: World(self.troubles, self.played),
            scorer=RewardScorer([]),
            tokenizer=CodePointTokenizer(),
            sampling=SamplingParameters(1.0, 4, 0),
            run_seed=0,
            wall_seconds=self.wall_seconds,
            purpose=purpose,
        )


class Bench:
    """A worker with its parts, and a trainer's batch source beside it. While `verdict` is set, no engine start passes."""

    verdict, log = None, None

    def __init__(self, run, url, folder, troubles, wall_seconds, rollout, prompts_per_step, kind="grpo"):
        self.config = LaminarConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"path": "d"},
                "rollout": {"lease_seconds": 60.0, "group_size": 1, "min_group_size": 1, **rollout},
                "trainer": {"prompts_per_step": prompts_per_step, "algorithm": {"kind": kind}},
                "staleness": {"max_staleness": 1},
            }
        )
        self.run, self.engine, self.player = run, Engine(), Player(troubles, wall_seconds)
        run_id = run.store.prefix.split(":")[1]
        self.worker = RolloutWorker(RoleContext("rollout-0", run_id, "token", url, folder), self.config)
        self.heard = []
        self.source = BatchSource(self.config, run.buffer, lambda group: True, self.notice)

    async def notice(self, text):
        self.heard.append(text)

    @contextlib.asynccontextmanager
    async def working(self, client):
        """The worker works meanwhile; the counters are balanced at every moment that is looked at."""

        async def start_engine(path, version):
            if self.verdict is not None:
                raise RejectedWeightsError(self.verdict)
            return self.engine, self.engine

        relay = Relay()
        self.replica = Replica(self.config.rollout.engine, relay, start_engine)
        await self.worker.equip(client, self.player, relay, self.replica, self.log)
        async with asyncio.TaskGroup() as tasks:
            self.task = tasks.create_task(self.worker.run())
            watch = tasks.create_task(self._watch())
            yield
            await self.worker.stop()
            watch.cancel()

    async def _watch(self):
        while True:
            assert (await self.run.buffer.counters()).is_balanced
            await asyncio.sleep(0.002)

    async def until(self, condition, seconds=10.0):
        async with asyncio.timeout(seconds):
            while not (found := await condition()):
                await asyncio.sleep(0.002)
        return found


@pytest.fixture
async def make_bench(make_run, valkey, tmp_path):
    from laminar.experience.client import connect  # a client of its own: the worker closes it

    async def make(
        troubles=None, *, wall_seconds=0.5, prompts=100, prompts_per_step=4, rollout=None, kind="grpo", **settings
    ):
        rollout = rollout or {}
        names = {"group_size", "min_group_size", "group_failure"} & rollout.keys()
        run = await make_run(
            prompts, prompts_per_step=prompts_per_step, max_staleness=1, **({n: rollout[n] for n in names} | settings)
        )
        bench = Bench(run, valkey.url, tmp_path, troubles or {}, wall_seconds, rollout, prompts_per_step, kind)
        bench.client = await connect(valkey.url)
        return bench

    return make


async def test_d17_a_raising_and_a_hanging_task_do_not_starve_the_step(make_bench):
    """Batch of 4, 6 tasks in flight, limit 0.5 s; task 3 raises at once, task 5 never returns; both are tried again."""
    bench = await make_bench({"2": [OSError("sandbox is gone")], "4": ["hang"]}, rollout={"max_in_flight_groups": 6})
    trained = []
    async with bench.working(bench.client):
        for step in (1, 2):
            batch = await asyncio.wait_for(bench.source.next_batch(0, step, lambda: False), 15)
            trained += [t.prompt_id for group in batch.groups for t in group]
            assert len(batch.groups) == 4
            await bench.run.buffer.publish(0, step)
        await bench.until(lambda: _is_ended(bench, {"2", "4"} - set(trained)))
    assert bench.worker._counts._failures == {"environment": 1, "timeout": 1}
    assert (bench.player.played["2"], bench.player.played["4"]) == (2, 2)
    assert len(set(trained)) == len(trained) == 8
    assert (await bench.run.buffer.counters()).is_balanced


async def _is_ended(bench, prompts):
    """Whether these prompts' groups wait, complete, for a later step."""
    headers = (await bench.run.buffer.peek()).headers
    ready = [h.group_id for h in headers if h.state is GroupState.READY]
    return prompts <= {t.prompt_id for group in await bench.run.buffer.fetch(ready) for t in group}


async def test_d17_tasks_that_stay_broken_are_given_up_and_the_step_still_completes(make_bench):
    broken = {"2": [OSError("sandbox is gone")] * 9, "4": ["hang"] * 9}
    bench = await make_bench(broken, wall_seconds=0.2, rollout={"max_in_flight_groups": 6, "max_attempts": 2})
    trained = []
    async with bench.working(bench.client):
        for step in (1, 2):
            batch = await asyncio.wait_for(bench.source.next_batch(0, step, lambda: False), 15)
            trained += [t.prompt_id for group in batch.groups for t in group]
            await bench.run.buffer.publish(0, step)
        await bench.until(lambda: _num_failed(bench, 4))
    assert not {"2", "4"} & set(trained)
    assert len(set(trained)) == 8
    failed = (await bench.run.buffer.counters()).failed
    assert failed == {"environment": 1, "timeout": 1}


async def _num_failed(bench, attempts):
    return bench.worker._counts._failures.total() == attempts and (await bench.run.buffer.counters()).num_failed == 2


async def test_d17_all_raise_and_the_run_stops_with_the_first_exceptions_message(make_bench):
    broken = {str(i): [OSError(f"sandbox {i} is gone")] * 3 for i in range(100)}
    bench = await make_bench(broken, rollout={"max_in_flight_groups": 6, "max_attempts": 1})
    started = time.monotonic()
    with pytest.raises(ExceptionGroup) as caught:
        async with bench.working(bench.client):
            await asyncio.wait_for(bench.source.next_batch(0, 1, lambda: False), 10)
    (error,) = caught.value.exceptions
    assert isinstance(error, RunFailedError)
    assert "sandbox 0 is gone" in str(error)
    assert error.exit_code != 0
    assert time.monotonic() - started < 5


async def test_d17_a_long_wait_names_the_missing_groups(make_bench, monkeypatch):
    monkeypatch.setattr("trainer.sampling.WAIT_NOTICE_SECONDS", 0.05)
    bench = await make_bench(prompts=4, max_epochs=1)
    bench.engine.hang = {"prompt 1"}
    async with bench.working(bench.client):
        waiting = asyncio.create_task(bench.source.next_batch(0, 1, lambda: False))
        await bench.until(lambda: _heard(bench))
        waiting.cancel()


async def _heard(bench):
    return any("1 more ready groups; in flight: 00000001 (rollout-0); " in text for text in bench.heard)


async def test_a_refilled_member_is_played_again_by_the_same_worker(make_bench):
    troubles = {"0": [OSError("flaky")]}
    rollout = {"group_size": 3, "group_failure": "refill", "max_attempts": 1, "min_group_size": 3}
    bench = await make_bench(troubles, prompts=1, prompts_per_step=1, max_epochs=1, rollout=rollout)
    async with bench.working(bench.client):
        batch = await asyncio.wait_for(bench.source.next_batch(0, 1, lambda: False), 5)
    assert [t.member for t in batch.groups[0]] == [0, 1, 2]
    assert sorted(t.attempt for t in batch.groups[0]) == [0, 0, 1]
    counters = await bench.run.buffer.counters()
    assert (counters.refilled, counters.num_failed) == (1, 0)
    assert bench.player.played["0"] == 4


async def test_only_what_was_accepted_or_failed_is_recorded(make_bench, tmp_path):
    """One member fails at first; another is handed in by a worker that had the group before, so ours is a duplicate."""
    rollout = {"group_size": 3, "group_failure": "refill", "max_attempts": 1}
    bench = await make_bench({"0": [OSError("flaky")]}, prompts=1, prompts_per_step=1, max_epochs=1, rollout=rollout)
    bench.log = TrajectoryLog(tmp_path, "rollout-0", CodePointTokenizer(), rate=1.0, max_bytes=10**6)
    play = bench.player.play

    async def overtaken(*arguments, **settings):
        trajectory = await play(*arguments, **settings)
        if trajectory.member == 2:
            await bench.run.buffer.submit(replace(trajectory, reward=7.0), "rollout-1")
        return trajectory

    bench.player.play = overtaken
    async with bench.working(bench.client):
        batch = await asyncio.wait_for(bench.source.next_batch(0, 1, lambda: False), 5)
    assert [t.reward for t in batch.groups[0]] == [1.0, 1.0, 7.0]
    records = TrajectoryFolder(tmp_path).summaries()
    assert sorted(r.trajectory_id[-3:] for r in records if not r.failure) == ["000", "001"]
    assert sum(bool(r.failure) for r in records) == 1


async def test_siblings_are_judged_together_once_the_last_of_them_has_ended(make_bench):
    """Three siblings, one of which is flaky; judging them fails the first time, and costs each of them one more game."""
    rollout = {"group_size": 3, "group_failure": "refill", "max_attempts": 1, "min_group_size": 2}
    bench = await make_bench({"0": [OSError("flaky")]}, prompts=1, prompts_per_step=1, max_epochs=1, rollout=rollout)
    judged = []

    async def judge(trajectories):
        judged.append([t.member for t in trajectories])
        if len(judged) == 1:
            failure = Failure(FailureKind.VERIFIER, "the judge is busy")
            # two refills are left of three: two members are played again, the third is over
            return [replace(t, reward=None, reward_terms={}, failure=failure) for t in trajectories]
        return [replace(t, reward=float(place), reward_terms={"rank": float(place)}) for place, t in enumerate(trajectories)]

    bench.player.judge = judge
    async with bench.working(bench.client):
        batch = await asyncio.wait_for(bench.source.next_batch(0, 1, lambda: False), 5)
    assert judged == [[0, 1, 2], [0, 1]]
    assert [(t.member, t.reward) for t in batch.groups[0]] == [(0, 0.0), (1, 1.0)]
    counters = await bench.run.buffer.counters()
    assert (counters.refilled, counters.failed) == (3, {"verifier": 1})
    assert bench.worker._counts._failures == {"environment": 1, "verifier": 3}


async def test_dropping_a_group_aborts_its_siblings_in_the_engine(make_bench):
    """Two members are being generated when the third fails."""
    rollout = {"group_size": 3, "group_failure": "drop", "max_attempts": 1}
    bench = await make_bench({"0": [OSError("broken")]}, prompts=1, prompts_per_step=1, max_epochs=1, rollout=rollout)
    bench.engine.hang = {"prompt 0"}
    async with bench.working(bench.client):
        await bench.until(lambda: _num_aborted(bench, 2))
        await bench.until(lambda: _no_group(bench))
    assert (await bench.run.buffer.counters()).failed == {"environment": 1, "too_few_siblings": 2}


async def _num_aborted(bench, number):
    return len(bench.engine.aborted) == number


async def _no_group(bench):
    return not bench.worker._groups


async def test_an_evicted_group_is_aborted_in_the_engine_within_a_moment_and_counted(make_bench):
    """The lease is 60 s, renewed every 15 s: the abort does not wait for that."""
    bench = await make_bench(prompts=2, prompts_per_step=1, max_epochs=1, rollout={"group_size": 2})
    bench.engine.hang = {"prompt 0"}
    async with bench.working(bench.client):
        await bench.until(lambda: _num_running(bench, 2))
        bench.engine.hang = set()
        started = time.monotonic()
        await bench.run.buffer.evict(["00000000"], EvictionReason.STALE, reissue=True)
        await bench.until(lambda: _num_aborted(bench, 2))
        seconds = time.monotonic() - started
        await bench.until(lambda: _is_ended(bench, {"0", "1"}))  # the prompt was issued again, and answered
        assert bench.worker._measure(None)["worker/aborted_trajectories"] == 2
    assert seconds < 1.0
    counters = await bench.run.buffer.counters()
    assert (counters.evicted, counters.dropped_lengths) == ({"stale": 2}, {"unfinished": 2})


async def _num_running(bench, number):
    return len(bench.engine.running) == number


WRONG = Verdict(FIRST, Check.RANKS, "rank 0 read 0.0 back: piece 3 is wrong")


async def damage(bench):
    """From now on the engine holds wrong weights, whatever is done."""
    bench.verdict = WRONG
    await bench.replica.condemn(WRONG.reason)


@pytest.mark.slow
async def test_a_replica_whose_weights_stay_wrong_leaves_and_others_go_on_with_its_groups(make_bench):
    bench = await make_bench(prompts=2, prompts_per_step=1, max_epochs=1)
    bench.engine.hang = {"prompt 0", "prompt 1"}
    run_id = bench.run.store.prefix.split(":")[1]
    async with bench.working(bench.client):
        await bench.until(lambda: _num_running(bench, 2))
        other = ReplicaEntry("rollout-1", "http://other", "0.0", "0.0", False, 0, 1, 0, 0, 0, 0)
        await ReplicaDirectory(bench.run.store.client, run_id, ttl_seconds=60).beat(other)
        await damage(bench)
        await asyncio.wait_for(asyncio.shield(bench.task), 20)
    assert (bench.replica.quarantine.num_in_row, bench.replica.restarts) == (3, 3)
    claim = await bench.run.claim("0.0", groups=2, worker="rollout-1")
    assert [(group.group_id, group.claim) for group in claim.groups] == [("00000000", 2), ("00000001", 2)]


@pytest.mark.slow
async def test_the_last_replica_whose_weights_stay_wrong_ends_the_run_and_says_why(make_bench):
    bench = await make_bench(prompts=2, prompts_per_step=1, max_epochs=1)
    bench.engine.hang = {"prompt 0", "prompt 1"}

    async def work():
        async with bench.working(bench.client):
            await bench.until(lambda: _num_running(bench, 2))
            await damage(bench)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await work()
    (error,) = caught.value.exceptions
    assert isinstance(error, RunFailedError)
    assert "3 times in a row (rank 0 read 0.0 back: piece 3 is wrong)" in str(error)
    assert "no other replica is left" in str(error)


async def test_a_worker_whose_agents_cannot_be_closed_still_ends_its_engine_and_says_that_it_has_left(make_bench):
    bench = await make_bench(prompts=1, prompts_per_step=1)

    async def refuse():
        raise RuntimeError("a server of the environment's does not end")

    bench.player.close = refuse
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(20), bench.working(bench.client):
            pass
    assert [str(error) for error in caught.value.exceptions] == ["a server of the environment's does not end"]
    assert bench.replica.is_down


async def test_remax_plays_one_greedy_answer_more_a_group_and_the_batch_brings_it_along(make_bench):
    bench = await make_bench(
        prompts=2, prompts_per_step=2, max_epochs=1, kind="remax", rollout={"group_size": 2}, group_size=3
    )
    async with bench.working(bench.client):
        batch = await asyncio.wait_for(bench.source.next_batch(0, 1, lambda: False), 5)
    for group in batch.groups:
        assert [(t.member, t.purpose) for t in group] == [(0, "train"), (1, "train"), (2, "greedy_baseline")]
    assert len(batch.seen_rewards) == 4
    sampling = sampling_for(bench.config, batch.groups[0][2].purpose)
    assert (sampling.temperature, sampling.max_new_tokens) == (0.0, 512)


def test_no_two_series_of_attempts_share_a_number(make_bench):
    config = LaminarConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"group_size": 2, "max_attempts": 3}}
    )
    firsts = [first_attempt(config.rollout, lease, replay, 2) for lease in (1, 2, 3) for replay in (0, 1, 2)]
    assert firsts == [0, 3, 6, 9, 12, 15, 18, 21, 24]


async def test_groups_whose_leases_ran_out_and_came_back_are_not_played_twice(make_bench):
    """A data module that stood still for longer than a lease: the next claim grants the worker what it still plays."""
    rollout = {"max_in_flight_groups": 9}
    bench = await make_bench(prompts=4, max_epochs=1, max_attempts=9, wall_seconds=30.0, rollout=rollout)
    bench.engine.hang = {f"prompt {i}" for i in range(4)}

    async def all_run():
        return len(bench.engine.running) >= 4

    async def all_are_owned():
        return [header.owner for header in (await bench.run.buffer.peek()).headers] == ["rollout-0"] * 4

    async with bench.working(bench.client):
        await bench.until(all_run)
        for _ in range(5):
            await bench.run.pool.reap(ahead_seconds=1000.0)
            await bench.until(all_are_owned)
    assert bench.player.played == dict.fromkeys("0123", 1)
    assert len(bench.engine.aborted) == 4
