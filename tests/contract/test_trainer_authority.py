"""The trainer's loop on a server that dies under it at every point of a step: nothing is trained twice, nothing is lost.

Training is a stand-in; server, data module, sampling, spool and loop are real.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import redis
import torch

from laminar.config.root import LaminarConfig
from laminar.experience.store import ExperienceStore
from laminar.telemetry.stream import TelemetryReader, TelemetryWriter
from trainer.audit import audit_run
from trainer.authority import Authority
from trainer.loop import TrainingLoop
from trainer.progress import Progress
from trainer.publishing import WeightPublisher
from trainer.spool import ReplaySpool
from trainer.step import StepReport

pytestmark = pytest.mark.heavy

STEPS, PROMPTS = 6, 100
SETTINGS = {"prompts_per_step": 2, "max_staleness": 1, "group_size": 2}


def config(**run):
    return LaminarConfig.model_validate(
        {
            "run": {"max_steps": STEPS} | run,
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rollout": {"group_size": 2},
            "trainer": {"prompts_per_step": 2},
            "checkpoint": {"every_steps": 100},
            "staleness": {"max_staleness": 1},
        }
    )


class Weights:
    """The relay's publisher: knows the newest version."""

    def __init__(self):
        self.newest = None

    def prepare(self, layout):
        pass

    def publish(self, version, tensors, probe, until="visible", fill=None):
        self.newest = version
        return SimpleNamespace(skipped=False, bytes=0, reason="", seconds=0.0)

    def finish_copy(self):
        return 0.0

    def settle(self):
        """Every version is there at once."""


class Session:
    """Trains nothing, but keeps the spool; `during` runs in the torch thread in the middle of a step.

    What `during` returns is why the step was skipped.
    """

    def __init__(self, folder, during):
        self.spool, self.saved_step, self.during = ReplaySpool(folder), 0, during
        self.keeps = lambda group: True

    is_partitioned = False

    def state_tensors(self):
        yield "w", torch.zeros(1)

    def state_shapes(self):
        yield "w", torch.empty(1, device="meta")

    def train(self, groups, step, oldest_trained=None, free_weights=None):
        skipped = self.during(step)
        metrics = {"reward/mean": 1.0, "train/tokens": 0.0 if skipped else 12.0, "mismatch/kl_staleness_0": step / 100}
        return StepReport(step, metrics, 12, skipped)

    def save(self, progress, frontier):
        self.saved_step = progress.step


async def play_until(done, run, weights, play):
    """Workers on the newest version; what they are refused they drop.

    They are told to end, not cancelled: a redis client that is connecting anew may swallow a cancellation.
    """
    while not done.is_set():
        version = weights.newest
        claim = await run.claim(str(version), groups=3) if version else None
        groups = claim.groups if claim else ()
        trajectories = [play(group.group_id, member, str(version)) for group in groups for member in group.members]
        if trajectories:
            await run.buffer.submit_many(trajectories, "w")
        await asyncio.sleep(0.01)


@pytest.fixture
def train_through(tmp_path, client, make_run, trajectory_maker):
    """Run the loop to its end while `during(step)` disturbs it; the run, its telemetry and the session."""

    async def go(during, keep_filled=False, end=("max_steps", STEPS), **limits):
        store = ExperienceStore(client, "r")
        run = await make_run(PROMPTS, opened=False, store=store, **SETTINGS)
        done, weights, session = asyncio.Event(), Weights(), Session(tmp_path / "checkpoints", during)
        publisher = WeightPublisher(weights, session)
        telemetry = TelemetryWriter(client, "r", "trainer-0")

        async def refill():
            while not done.is_set():
                if not await client.exists(store.key("run")):
                    await make_run(PROMPTS, opened=False, store=store, **SETTINGS)
                await asyncio.sleep(0.02)

        with ThreadPoolExecutor(1) as thread:
            authority = Authority(run.buffer, publisher, lambda: weights.newest, telemetry, thread, Progress(), None)
            await authority.open()
            loop = TrainingLoop(config(**limits), session, publisher, run.buffer, telemetry, authority, thread)
            async with asyncio.timeout(60), asyncio.TaskGroup() as others:
                others.create_task(play_until(done, run, weights, trajectory_maker.play))
                if keep_filled:
                    others.create_task(refill())
                try:
                    result = await loop.run()
                finally:
                    done.set()
        assert result == {"reason": end[0], "step": end[1]}
        return run, session

    return go


async def assert_exactly_once(run, session, tmp_path, lineage):
    found = audit_run(tmp_path / "checkpoints", PROMPTS)
    assert (found.num_steps, found.missing_steps, found.twice, found.unaccounted) == (STEPS, (), (), ())
    snapshot = await run.buffer.peek()
    assert str(snapshot.published) == f"{lineage}.{STEPS}"
    assert snapshot.counters.is_balanced
    assert snapshot.counters.trained == STEPS * 2 * 2
    told = [event for event in await TelemetryReader(run.store.client, "r").read() if event.kind == "step"]
    assert {event.metrics["train/step"] for event in told} >= set(range(2, STEPS + 1))


async def test_undisturbed_and_a_mismatch_on_fresh_tokens_above_the_alarm_is_told(train_through, tmp_path):
    run, session = await train_through(lambda step: None)
    await assert_exactly_once(run, session, tmp_path, lineage=0)
    events = await TelemetryReader(run.store.client, "r").read()
    told = [e.fields["text"] for e in events if e.kind == "notice" and "mismatch_alarm" in e.fields["text"]]
    assert [text.split(":")[0] for text in told] == ["step 6"]  # 0.06; the alarm is at 0.05
    left = {event.metrics["train/step"]: event.fields["left"] for event in events if event.kind == "step"}
    assert left == {step: {"run.max_steps": STEPS - step} for step in range(1, STEPS + 1)}


async def test_a_step_that_is_skipped_for_safety_publishes_its_number_and_says_why(train_through, tmp_path):
    run, session = await train_through(lambda step: "trajectory 7-0 got a loss that is not finite" if step == 3 else None)
    await assert_exactly_once(run, session, tmp_path, lineage=0)
    events = await TelemetryReader(run.store.client, "r").read()
    notices = [event.fields["text"] for event in events if event.kind == "notice"]
    assert "step 3 skipped: trajectory 7-0 got a loss that is not finite" in notices
    assert [e.metrics["train/skipped_steps"] for e in events if e.kind == "step"] == [0, 0, 1, 1, 1, 1]


async def test_too_many_skipped_steps_in_a_row_end_the_run_with_the_reason(train_through):
    reasons = {2: "a", 4: "b", 5: "trajectory 7-0 got a loss that is not finite"}
    with pytest.raises(ExceptionGroup) as caught:
        await train_through(reasons.get, max_skipped_steps=2)
    (failure,) = caught.value.exceptions
    assert str(failure).startswith("2 steps in a row were skipped for safety (run.max_skipped_steps), the last one because")
    assert "trajectory 7-0" in str(failure)


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        ({"max_trained_tokens": 30}, ("max_trained_tokens", 3)),
        ({"stop_at_reward": 1.0, "stop_at_reward_steps": 4}, ("stop_at_reward", 4)),
    ],
)
async def test_a_run_ends_with_the_step_that_reaches_its_limit_and_saves_it(train_through, limits, end):
    _, session = await train_through(lambda step: None, end=end, **limits)
    assert session.saved_step == end[1]


@pytest.mark.parametrize(
    "lost_bytes", [0, pytest.param(500, marks=pytest.mark.slow), 5000], ids=["nothing_lost", "some_lost", "more_lost"]
)
async def test_a_server_that_is_restarted_while_a_step_trains(train_through, server, tmp_path, lost_bytes, reboot):
    def during(step):
        if step == 3:
            reboot(server, lost_bytes)

    run, session = await train_through(during)
    await assert_exactly_once(run, session, tmp_path, lineage=1)


async def test_a_server_that_is_restarted_in_every_step(train_through, server, tmp_path, reboot):
    run, session = await train_through(lambda step: reboot(server, 300))
    await assert_exactly_once(run, session, tmp_path, lineage=STEPS)


async def test_a_server_that_is_replaced_by_an_empty_one_while_a_step_trains(train_through, server, tmp_path):
    def during(step):
        if step == 3:
            with redis.Redis.from_url(server.url) as client:
                client.flushall()

    run, session = await train_through(during, keep_filled=True)
    await assert_exactly_once(run, session, tmp_path, lineage=1)


@pytest.mark.parametrize("command", ["commit", "publish", "ack"])
async def test_a_server_that_dies_between_the_calls_of_a_step(train_through, server, tmp_path, command, monkeypatch, reboot):
    """The server dies right after the spool file is there, after the number is published, or after the ack."""
    from laminar.experience.buffer import ExperienceBuffer

    def after(owner, name, is_step):
        original = getattr(owner, name)
        if name == "commit":

            def committed(self, header, groups):
                length = original(self, header, groups)
                if header.step == 3:
                    reboot(server, 200)
                return length

            monkeypatch.setattr(owner, name, committed)
            return

        async def called(self, *arguments, **more):
            await original(self, *arguments, **more)
            if is_step(*arguments):
                await asyncio.to_thread(reboot, server, 200)

        monkeypatch.setattr(owner, name, called)

    after(
        ReplaySpool if command == "commit" else ExperienceBuffer,
        command,
        lambda lineage, number: (lineage, number) == (0, 3),
    )
    run, session = await train_through(lambda step: None)
    await assert_exactly_once(run, session, tmp_path, lineage=1)
