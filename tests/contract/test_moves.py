"""Moves between replicas: exact to the token, one owner, refused when they must be, undone when they fail; and fail-over.

Real replicas, doors, seats and client; the engines are emulated ones in this process. Answers of emulated engines are known
beforehand: the same from any engine, whatever happens on the way.
"""

import asyncio
import contextlib
import json
import uuid

import numpy as np
import pytest
from aiohttp import ClientSession
from safetensors.numpy import save_file

from laminar.config.rollout import EngineConfig, RepackConfig, RolloutConfig
from laminar.directory import ReplicaDirectory, ReplicaEntry
from laminar.experience.partial import AppendOutcome
from laminar.policies.repack import RepackLimits
from laminar.seeds import trajectory_seed
from laminar.simulate.timings import Lengths, StepTimes
from laminar.types import ClaimedGroup, FinishReason, Prompt, SamplingParameters, WeightVersion
from rollout.engines.client import EngineClient
from rollout.engines.emulated_engine import EmulatedEngine, EmulatedOptions
from rollout.engines.emulated_server import EmulatedServer
from rollout.engines.wire import GenerateWire, SamplingWire
from rollout.environments.single_turn import SingleTurn
from rollout.episode import play_episode
from rollout.guest_door import GuestDoor
from rollout.harbour import Harbour
from rollout.journal import Journal
from rollout.manager import Repacker
from rollout.occupants import GuestLimits
from rollout.replica import Replica
from rollout.rewards.scorer import RewardScorer, Term
from rollout.seat import Seats
from rollout.worker_counts import WorkerCounts

V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)
PROMPT = np.array([5, 9, 17], np.int32)
ANSWER_TOKENS = 120
TOKEN, RUN = "secret", "run-1"
ROOMY = GuestLimits(kv_limit=1.0, headroom_tokens=0, max_requests=64)
OPTIONS = EmulatedOptions(
    StepTimes(np.array([1.0, 2.0]), np.array([0.002, 0.002]), 1000.0),
    Lengths(np.array([0.0, 1.0]), np.array([ANSWER_TOKENS, ANSWER_TOKENS], float)),
    max_cached_tokens=2000,
)


def write_weights(folder, scale):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 128, "eos_token_id": 2, "max_position_embeddings": 9999}))
    save_file({"weight": np.full(4, scale, np.float32)}, folder / "model.safetensors")
    return folder


class Versions:
    """A puller that knows some folders of weights."""

    def __init__(self, root):
        self.folders = {V0: write_weights(root / "v0", 1.0), V1: write_weights(root / "v1", 1.5)}
        self.newest = V0

    def latest(self):
        return self.newest

    @contextlib.contextmanager
    def lease(self, version):
        yield self.folders[version]


class Node:
    """One replica with its door and its seats, and its line in the directory."""

    def __init__(self, name, versions, directory, options, limits, num_starts, replica_class):
        self.name, self.directory, self.options, self.servers = name, directory, options, []
        self.num_starts = num_starts
        config = EngineConfig(start_seconds=30, max_cached_tokens=options.max_cached_tokens)
        self.replica = replica_class(config, versions, self.start_engine)
        self.harbour = Harbour(directory, token=TOKEN, request_seconds=30, move_seconds=10)
        self.seats = Seats(self.replica, self.harbour)
        self.door = GuestDoor(self.replica, limits, token=TOKEN, release=self.release)

    async def start_engine(self, path, version):
        server = EmulatedServer(
            path, str(version), self.options, time_factor=1.0, token=TOKEN, run_id=RUN, max_arrears_seconds=0.0
        )  # a busy machine makes steps late, never many at once
        self.servers.append(server)
        if len(self.servers) > self.num_starts:
            await asyncio.Event().wait()  # a restart that takes for ever
        return server, EngineClient(await server.start(), token=TOKEN, run_id=RUN, version=version, control_seconds=5)

    async def release(self, url):
        return await self.seats.release(url) | {"guests": self.door.send_on(url)}

    async def tell(self, newest="", is_draining=False):
        version, berths = self.replica.version, self.replica.berths
        await self.directory.beat(
            ReplicaEntry(
                self.name, self.harbour.url, str(version or ""), newest, is_draining,
                sum(o.context_tokens for o in berths.occupants), 2000, len(berths.occupants), 0, berths.num_admitted,
                max((o.expected_tokens for o in berths.occupants), default=0),
            )
        )  # fmt: skip

    @property
    def num_open(self):
        return len(self.replica.berths.occupants)

    @property
    def num_asked(self):
        return len(self.servers[0].engine.book.waiting) + len(self.servers[0].engine.book.running)

    @property
    def sampled(self):
        return sum(server.engine.generated_tokens for server in self.servers)


@pytest.fixture
async def make_nodes(tmp_path, redis_client, run_id):
    """Start replicas by name; `kept` restarts dead engines."""
    versions, directory = Versions(tmp_path), ReplicaDirectory(redis_client, run_id)
    async with contextlib.AsyncExitStack() as stack:

        async def make(*names, limits=ROOMY, num_starts=9, options=OPTIONS, replica_class=Replica):
            nodes = [Node(name, versions, directory, options, limits, num_starts, replica_class) for name in names]
            for node in nodes:
                node.versions = versions
                await node.replica.start()
                stack.push_async_callback(node.replica.kill)
                node.harbour.url = await stack.enter_async_context(node.door.open("127.0.0.1"))
                stack.push_async_callback(node.harbour.close)
                await node.tell()
            return nodes

        yield make


def sampling(seed=3, new=400):
    return SamplingParameters(1.0, new, seed)


def expected(versions, seed=3, version=V0):
    """The answer of an engine that was left in peace, ids and log-probs."""
    engine = EmulatedEngine(versions.folders[version], str(version), OPTIONS)
    output = engine.add(GenerateWire(PROMPT.tolist(), "r", SamplingWire(max_new_tokens=400, sampling_seed=seed)))
    while output.finish_reason is None:
        engine.end(engine.begin().num_tokens)
    return output.ids, np.array(output.logprobs, np.float32).tolist()


class Answer:
    """One turn, sampled as `TurnSampler` does: asked again after an abort, with what is there."""

    def __init__(self, seed=3):
        self.seed, self.ids, self.logprobs, self.versions = seed, [], [], []
        self.num_requests = self.num_heard = 0

    async def sample(self, seat):
        reason = FinishReason.ABORT
        while reason is FinishReason.ABORT:
            self.num_requests += 1
            context = np.concatenate([PROMPT, np.array(self.ids, np.int32)])
            answer = await seat.generate(context, sampling(self.seed, 400 - len(self.ids)), uuid.uuid4().hex, self.hear)
            for segment in answer.segments:
                self.ids += segment.token_ids.tolist()
                self.logprobs += segment.logprobs.tolist()
                self.versions += [segment.version] * len(segment)
            reason = answer.finish_reason
        return reason

    def hear(self, part):
        self.num_heard += len(part)

    async def reach(self, count):
        await until(lambda: self.num_heard >= count, f"{count} tokens")


async def until(condition, what):
    try:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)
    except TimeoutError:
        pytest.fail(f"waited 20 s for {what}, in vain")


@contextlib.asynccontextmanager
async def playing(node, answer):
    async with node.seats.open("g") as seat:
        task = asyncio.create_task(answer.sample(seat))
        try:
            yield seat, task
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_moved_answer_is_exact_and_nothing_is_sampled_twice(make_nodes):
    a, b = await make_nodes("a", "b")
    answer = Answer()
    async with playing(a, answer) as (seat, task):
        await answer.reach(30)
        assert await seat.move(b.harbour.url)
        assert (a.num_open, b.num_open) == (0, 1)
        assert await task is FinishReason.STOP
        assert b.num_open == 1, "it is open at its destination until its seat is closed, also between turns"
    await until(lambda: b.num_open == 0, "the guest to leave")
    assert (answer.ids, answer.logprobs) == expected(a.versions)
    assert set(answer.versions) == {V0}
    assert a.sampled + b.sampled == ANSWER_TOKENS
    assert min(a.sampled, b.sampled) > 0


async def test_moving_back_and_forth_and_again_to_where_it_is_changes_nothing(make_nodes):
    a, b, c = await make_nodes("a", "b", "c")
    answer = Answer()
    async with playing(a, answer) as (seat, task):
        for step, target in enumerate((b, b, c, a, a)):
            await answer.reach(10 + 10 * step)
            assert await seat.move(target.harbour.url)
            wanted = [int(node is target) for node in (a, b, c)]
            await until(lambda wanted=wanted: [node.num_open for node in (a, b, c)] == wanted, "one owner")
        await task
    assert (answer.ids, answer.logprobs) == expected(a.versions)
    assert a.sampled + b.sampled + c.sampled == ANSWER_TOKENS


async def test_moves_before_the_first_token_are_no_aborts_to_the_episode(make_nodes):
    """It would take thirteen in a row for an engine that fails."""
    a, b = await make_nodes("a", "b")
    answer = Answer()
    for node in (a, b):
        await node.servers[0].loop.call(lambda book: book.pause("in_place"))
    async with playing(a, answer) as (seat, task):
        for target in (b, a) * 7:
            await until(lambda: a.num_asked + b.num_asked == 1, "one request")
            assert await seat.move(target.harbour.url)
        for node in (a, b):
            await node.servers[0].loop.call(lambda book: book.resume())
        assert await task is FinishReason.STOP
    assert answer.num_requests == 1
    assert (answer.ids, answer.logprobs) == expected(a.versions)


async def test_two_moves_at_once_leave_one_owner(make_nodes):
    a, b, c = await make_nodes("a", "b", "c")
    answer = Answer()
    async with playing(a, answer) as (seat, task):
        await answer.reach(10)
        outcomes = await asyncio.gather(seat.move(b.harbour.url), seat.move(c.harbour.url))
        assert sorted(outcomes) == [False, True]
        await until(lambda: a.num_open + b.num_open + c.num_open == 1, "one owner")
        await task
    assert (answer.ids, answer.logprobs) == expected(a.versions)


async def test_an_answer_that_ends_in_the_same_moment_settles_the_race(make_nodes):
    """Moves at every point of many answers, the last token included."""
    a, b = await make_nodes("a", "b")
    for count in (ANSWER_TOKENS - 1, ANSWER_TOKENS):
        answer = Answer()
        async with playing(a, answer) as (seat, task):
            await answer.reach(count)
            await seat.move(b.harbour.url)
            assert await task is FinishReason.STOP
        assert (answer.ids, answer.logprobs) == expected(a.versions)
    await until(lambda: a.num_open + b.num_open == 0, "everybody to leave")


async def test_a_move_to_other_weights_is_refused_and_the_answer_stays_where_it_was(make_nodes):
    a, b = await make_nodes("a", "b")
    await b.replica.swap(V1)
    answer = Answer()
    async with playing(a, answer) as (seat, task):
        await answer.reach(10)
        assert not await seat.move(b.harbour.url)
        assert (a.num_open, b.num_open) == (1, 0)
        await task
    assert answer.num_requests == 1, "it was not even interrupted"
    assert answer.ids == expected(a.versions)[0]


async def test_a_move_to_a_full_or_absent_replica_is_refused(make_nodes):
    a, b = await make_nodes("a", "b", limits=GuestLimits(1.0, 0, 1))
    first, second = Answer(1), Answer(2)
    async with playing(a, first) as (seat, task), playing(b, second) as (_, other):
        await first.reach(5)
        assert not await seat.move(b.harbour.url)
        assert not await seat.move("http://127.0.0.1:9")
        await asyncio.gather(task, other)
    assert first.ids == expected(a.versions, 1)[0]
    assert first.num_requests == 1


async def test_room_for_growth_is_kept_at_the_destination(make_nodes):
    """2,000 places, at most half of them used: 3 prompt tokens and 1,000 of growth are too much."""
    a, b = await make_nodes("a", "b", limits=GuestLimits(0.5, 1000, 64))
    answer = Answer()
    async with playing(a, answer) as (seat, task):
        await answer.reach(5)
        assert not await seat.move(b.harbour.url)
        await task


async def test_a_draining_replica_takes_guests_but_no_new_work_and_swaps_when_they_have_left(make_nodes):
    a, b = await make_nodes("a", "b")
    moved, resident = Answer(1), Answer(2)
    async with playing(b, resident) as (_, staying):
        await resident.reach(5)

        async def swap():
            async with b.replica.berths.close_for_swap(60) as drained:
                assert drained
                await b.replica.swap(V1)

        swapping = asyncio.create_task(swap())
        await until(lambda: b.replica.berths.is_closed, "the drain")
        new = asyncio.create_task(b.replica.berths.admit())
        async with playing(a, moved) as (seat, task):
            await moved.reach(5)
            assert await seat.move(b.harbour.url)
            await task
            assert not swapping.done()
        await staying
        assert not new.done()
    await asyncio.wait_for(swapping, 20)
    await b.replica.berths.leave(await new)
    assert b.replica.version == V1
    assert {*moved.versions, *resident.versions} == {V0}


async def test_a_released_replica_is_empty_and_its_guests_went_on_too(make_nodes):
    a, b, c = await make_nodes("a", "b", "c")
    guest, own = Answer(1), Answer(2)
    async with playing(a, guest) as (seat, first), playing(b, own) as (_, second):
        await guest.reach(5)
        await own.reach(5)
        assert await seat.move(b.harbour.url)
        assert await b.release(c.harbour.url) == {"moved": 1, "stayed": 0, "guests": 1}
        await until(lambda: b.num_open == 0, "an empty source")
        assert c.num_open == 2
        await asyncio.gather(first, second)
    assert guest.ids == expected(a.versions, 1)[0]
    assert own.ids == expected(a.versions, 2)[0]


async def test_a_cancelled_guest_frees_its_host(make_nodes):
    a, b = await make_nodes("a", "b")
    answer = Answer()
    async with playing(a, answer) as (seat, _):
        await answer.reach(5)
        assert await seat.move(b.harbour.url)
        await answer.reach(20)
    await until(lambda: b.num_open == 0 and not b.servers[0].engine.load().running, "an empty host")


async def test_a_dead_engines_answers_go_on_elsewhere_at_the_same_version(make_nodes):
    a, b = await make_nodes("a", "b", num_starts=1)
    answer = Answer()
    async with playing(a, answer) as (seat, task):
        await answer.reach(30)
        await a.servers[0].kill()
        assert await task is FinishReason.STOP
        assert seat.url == b.harbour.url
    assert (answer.ids, answer.logprobs) == expected(a.versions)
    assert set(answer.versions) == {V0}
    assert b.sampled < ANSWER_TOKENS, "what had come was not sampled again"


async def test_without_one_of_the_same_version_they_go_on_at_the_newest_in_a_new_segment(make_nodes):
    a, b = await make_nodes("a", "b", num_starts=1)
    await b.replica.swap(V1)
    await b.tell()
    answer = Answer()
    async with playing(a, answer) as (_, task):
        await answer.reach(30)
        await a.servers[0].kill()
        assert await task is FinishReason.STOP
    kept = answer.versions.count(V0)
    assert kept >= 30
    assert answer.versions == [V0] * kept + [V1] * (ANSWER_TOKENS - kept)
    assert answer.ids == expected(a.versions)[0]
    assert answer.logprobs[:kept] == expected(a.versions)[1][:kept]
    assert answer.logprobs[kept:] == expected(a.versions, version=V1)[1][kept:]


async def test_a_guest_whose_host_dies_goes_home(make_nodes):
    a, b = await make_nodes("a", "b", num_starts=1)
    answer = Answer()
    async with playing(a, answer) as (seat, task):
        await answer.reach(10)
        assert await seat.move(b.harbour.url)
        await answer.reach(40)
        await b.servers[0].kill()
        assert await task is FinishReason.STOP
        assert seat.url == a.harbour.url
        assert a.num_open == 1
    assert (answer.ids, answer.logprobs) == expected(a.versions)


class Buggy(Replica):
    """Fails of a bug of ours as soon as it is to generate."""

    async def generate(self, *arguments):
        raise RuntimeError("a bug")


async def test_a_bug_in_the_host_sends_its_guest_home_at_once(make_nodes):
    """Home's own deadline, 30 s, is longer than this test's."""
    (a,), (b,) = await make_nodes("a"), await make_nodes("b", replica_class=Buggy)
    answer = Answer()
    async with playing(a, answer) as (seat, task), asyncio.timeout(20):
        await answer.reach(10)
        assert await seat.move(b.harbour.url)
        assert await task is FinishReason.STOP
        assert seat.url == a.harbour.url
    assert (answer.ids, answer.logprobs) == expected(a.versions)
    await until(lambda: b.num_open == 0, "an empty host")


async def test_an_answer_without_a_refuge_waits_for_its_own_engine(make_nodes):
    (a,) = await make_nodes("a")
    answer = Answer()
    async with playing(a, answer) as (_, task):
        await answer.reach(10)
        a.versions.newest = V1
        await a.servers[0].kill()
        await until(lambda: a.replica.is_down, "the death to be seen")
        await a.replica.restart()
        assert await task is FinishReason.STOP
    kept = answer.versions.count(V0)
    assert kept >= 10
    assert answer.versions == [V0] * kept + [V1] * (ANSWER_TOKENS - kept)


async def test_a_moved_episodes_journal_hears_every_token_once(make_nodes):
    """The whole of worker's use: episode, turn, journal; D12 across a move."""
    a, b = await make_nodes("a", "b")
    pieces = []
    group = ClaimedGroup("00000000", 0, Prompt("p", "?"), (0,), 1)

    def put_by(journal):
        if (piece := journal.batch()) is not None:
            pieces.append(piece)
            journal.settle(piece, AppendOutcome.APPENDED)

    journal = Journal(group, 0, 0, batch_tokens=16, on_batch=put_by)
    counts = WorkerCounts(RolloutConfig())

    class Ids:
        def encode(self, content):
            return PROMPT

        encode_observation = encode

        def decode(self, ids, *, keep_special=False):
            return " ".join(map(str, ids))

    async with a.seats.open("00000000") as seat:
        playing_episode = asyncio.create_task(
            play_episode(
                group=group, member=0, attempt=0, engine=seat, make_environment=SingleTurn,
                scorer=RewardScorer([Term("one", lambda prompt, text: 1.0)]), tokenizer=Ids(),
                sampling=SamplingParameters(1.0, 400, 0), run_seed=3, wall_seconds=60, journal=journal,
            )
        )  # fmt: skip
        await until(lambda: len(pieces) > 1, "tokens")
        assert await seat.move(b.harbour.url)
        trajectory = await playing_episode
    counts.end_record(journal)
    ids, logprobs = expected(a.versions, trajectory_seed(3, trajectory.trajectory_id, 0))
    (chain,) = trajectory.chains
    assert chain.token_ids().tolist() == [*PROMPT.tolist(), *ids]
    assert chain.rollout_logprobs()[len(PROMPT) :].tolist() == logprobs
    saved = [segment for piece in pieces for turn in piece.turns for segment in turn.segments]
    assert np.concatenate([s.token_ids for s in saved]).tolist() == ids[: sum(map(len, saved))]
    assert [piece.offset for piece in pieces] == np.cumsum(
        [0, *(sum(t.num_tokens for t in piece.turns) for piece in pieces)]
    )[:-1].tolist()


async def test_the_manager_empties_a_draining_replica_which_then_swaps_while_the_other_finishes(make_nodes):
    """Over real doors: the plan, the command, the moves, the swap; nothing is lost, nobody holds anybody back."""
    a, b = await make_nodes("a", "b")
    short, long = Answer(1), Answer(2)
    async with contextlib.AsyncExitStack() as stack:
        (_, first), (_, second) = [await stack.enter_async_context(playing(*each)) for each in ((a, short), (b, long))]
        await short.reach(20)
        await long.reach(60)

        async def swap(node):
            async with node.replica.berths.close_for_swap(60) as drained:
                await node.replica.swap(V1)
                return drained

        swaps = [asyncio.create_task(swap(node)) for node in (a, b)]
        await until(lambda: a.replica.berths.is_closed and b.replica.berths.is_closed, "drains")
        for node in (a, b):
            await node.tell(newest="0.1", is_draining=True)

        manager = Repacker(RepackConfig(), RepackLimits(0.8, 1.0, 0, 64), command_release)
        (move,) = await manager.consolidate(await a.directory.entries())
        source, other = (a, b) if move.source == "a" else (b, a)
        assert await asyncio.wait_for(swaps[0 if source is a else 1], 20)
        assert source.replica.version == V1
        await asyncio.gather(first, second)
    assert await asyncio.gather(*swaps) == [True, True]
    assert other.replica.version == V1
    assert (short.ids, long.ids) == (expected(a.versions, 1)[0], expected(a.versions, 2)[0])
    assert {*short.versions, *long.versions} == {V0}
    assert a.sampled + b.sampled == 2 * ANSWER_TOKENS
    assert (manager.tally.moved_trajectories, manager.tally.failed_moves) == (1, 0)


async def command_release(source, destination, version):
    async with (
        ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
        session.post(f"{source}/release", json={"destination": destination, "version": version}) as response,
    ):
        return await response.json()


async def test_a_command_that_comes_after_the_swap_moves_nothing(make_nodes):
    """The plan was made while the source drained at version 0; now it holds 1 and has new work."""
    a, b = await make_nodes("a", "b")
    answer = Answer()
    await a.replica.swap(V1)
    async with playing(a, answer) as (_, task):
        await answer.reach(5)
        outcome = await command_release(a.harbour.url, b.harbour.url, "0.0")
        assert outcome == {"moved": 0, "stayed": 0, "guests": 0}
        assert a.num_open == 1
        await task


async def test_in_mode_turn_a_swap_waits_for_the_turn_and_the_next_turn_has_the_new_weights(make_nodes):
    (a,) = await make_nodes("a")
    first, second = Answer(1), Answer(2)
    async with a.seats.open("g") as seat:
        turn = asyncio.create_task(first.sample(seat))
        await first.reach(10)

        async def swap():
            async with a.replica.hold_turns(60) as ended:
                assert ended
                await a.replica.swap(V1)

        swapping = asyncio.create_task(swap())
        await asyncio.sleep(0)
        next_turn = asyncio.create_task(second.sample(seat))
        await turn
        await asyncio.wait_for(swapping, 20)
        await next_turn
        assert a.num_open == 1, "the trajectory stays open over the swap"
    assert (set(first.versions), set(second.versions)) == ({V0}, {V1})


async def test_a_stranger_without_the_runs_token_gets_no_seat_and_no_obedience(make_nodes):
    (a,) = await make_nodes("a")
    async with ClientSession() as session:
        async with session.post(f"{a.harbour.url}/release", json={"destination": "http://x"}) as response:
            assert response.status == 401
        async with session.get(f"{a.harbour.url}/guest") as response:
            assert response.status == 401


async def test_who_is_silent_is_not_in_the_directory(redis_client, run_id):
    directory = ReplicaDirectory(redis_client, run_id, ttl_seconds=0.4)
    await directory.beat(ReplicaEntry("a", "http://a", "0.0", "0.0", False, 0, 1, 0, 0, 0, 0))
    assert [entry.replica for entry in await directory.entries()] == ["a"]
    async with asyncio.timeout(20):
        while await directory.entries():  # the server's clock, not ours
            await asyncio.sleep(0.01)
