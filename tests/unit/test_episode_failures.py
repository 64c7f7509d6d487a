"""Whatever goes wrong outside our own code becomes a failure with its kind, in bounded time."""

import asyncio

import pytest

from laminar.config.system import EnvironmentConfig
from laminar.errors import ConfigError, DeadlineError, EngineError
from laminar.types import ClaimedGroup, FailureKind, FinishReason, Message, Prompt, SamplingParameters
from rollout.boundary import EpisodeError, guard
from rollout.environments.base import Observation, StepResult
from rollout.environments.factory import build_environment_factory
from rollout.environments.single_turn import SingleTurn
from rollout.episode import play_episode
from rollout.rewards.scorer import RewardScorer, Term
from rollout.scripted import CodePointTokenizer, ScriptedEngine

RIGHT = RewardScorer([Term("one", lambda prompt, text: 1.0)])


class World:
    """A single turn whose methods can be replaced."""

    def __init__(self, **methods):
        self.closed = 0
        self.methods = methods

    async def _call(self, name, default):
        return await self.methods[name]() if name in self.methods else default

    async def reset(self, prompt):
        return await self._call("reset", Observation("?"))

    async def step(self, completion):
        return await self._call("step", StepResult(done=True))

    async def close(self):
        self.closed += 1
        await self._call("close", None)


async def hang():
    await asyncio.Event().wait()


def raising(error):
    async def fail():
        raise error

    return fail


def returning(value):
    async def give():
        return value

    return give


async def play(*, world=None, engine=None, scorer=RIGHT, wall_seconds=10.0, make=None):
    world = world or World()
    return await play_episode(
        group=ClaimedGroup("00000000", 0, Prompt("p", "2+2="), (0,), 0),
        member=0,
        attempt=0,
        engine=engine or ScriptedEngine(["4"]),
        make_environment=make or (lambda: world),
        scorer=scorer,
        tokenizer=CodePointTokenizer(),
        sampling=SamplingParameters(1.0, 8, 0),
        run_seed=0,
        wall_seconds=wall_seconds,
        worker="rollout-0",
    )


async def test_a_good_episode_has_a_reward_its_terms_and_timings():
    trajectory = await play()
    assert trajectory.failure is None
    assert trajectory.reward_terms == {"one": 1.0}
    assert (trajectory.trajectory_id, trajectory.prompt_id, trajectory.worker) == ("00000000-000", "p", "rollout-0")
    assert trajectory.timings.total_seconds >= trajectory.timings.generate_seconds >= 0
    assert trajectory.timings.started_at > 0


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_a_raising_environment_is_an_environment_failure(method):
    world = World(**{method: raising(RuntimeError("sandbox is gone"))})
    trajectory = await play(world=world)
    assert trajectory.failure.kind is FailureKind.ENVIRONMENT
    assert "sandbox is gone" in trajectory.failure.text
    assert method in trajectory.failure.text
    assert world.closed == 1


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_a_hanging_environment_is_a_timeout_within_the_wall_budget(method):
    world = World(**{method: hang})
    trajectory = await play(world=world, wall_seconds=0.05)
    assert trajectory.failure.kind is FailureKind.TIMEOUT
    assert trajectory.finish_reason is FinishReason.WALL_TIME
    assert world.closed == 1


async def test_an_environment_that_cannot_be_made_is_an_environment_failure():
    def make():
        raise OSError("no display")

    assert (await play(make=make)).failure.kind is FailureKind.ENVIRONMENT


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("reset", "just text"),
        ("reset", None),
        ("step", 1.0),
        ("step", StepResult(done=False)),
        ("step", StepResult(done=True, reward_terms={"score": float("nan")})),
        ("step", StepResult(done=True, reward_terms={"score": None})),
        ("step", StepResult(done=True, reward_terms={1: 0.5})),
        ("step", StepResult(done=True, reward_terms={"a": 1.7e308, "b": 1.7e308})),
        ("step", StepResult(done=False, observation=Observation((Message("user", "hm"),)))),
    ],
)
async def test_nonsense_from_an_environment_is_a_user_bug(method, value):
    trajectory = await play(world=World(**{method: returning(value)}))
    assert trajectory.failure.kind is FailureKind.USER_BUG
    assert trajectory.reward is None


async def test_a_method_that_is_no_coroutine_is_a_user_bug():
    class Plain(World):
        def step(self, completion):
            return StepResult(done=True)

    failure = (await play(world=Plain())).failure
    assert failure.kind is FailureKind.USER_BUG
    assert "async def" in failure.text


async def test_an_environment_may_name_the_kind_of_failure():
    world = World(step=raising(EpisodeError(FailureKind.TOOL, "the shell died")))
    assert (await play(world=world)).failure.kind is FailureKind.TOOL


async def test_an_empty_first_observation_is_an_environment_failure():
    assert (await play(world=World(reset=returning(Observation(""))))).failure.kind is FailureKind.ENVIRONMENT


@pytest.mark.parametrize("error", [EngineError("connection refused"), DeadlineError("an answer", 3)])
async def test_a_failing_engine_is_an_engine_failure(error):
    trajectory = await play(engine=ScriptedEngine([error]))
    assert trajectory.failure.kind is FailureKind.ENGINE
    assert str(error) in trajectory.failure.text


async def test_a_hanging_engine_is_a_timeout_and_its_request_is_cancelled():
    cancelled = asyncio.Event()

    class Silent:
        async def generate(self, input_ids, sampling, request_id):
            try:
                await hang()
            finally:
                cancelled.set()

    trajectory = await play(engine=Silent(), wall_seconds=0.05)
    assert trajectory.failure.kind is FailureKind.TIMEOUT
    assert cancelled.is_set()


async def test_a_slow_reward_within_the_wall_budget_is_a_verifier_failure_beyond_it_a_timeout():
    async def judge(prompt, text):
        await hang()

    inside = await play(scorer=RewardScorer([Term("slow", judge, timeout_seconds=0.05)]))
    beyond = await play(scorer=RewardScorer([Term("slow", judge)]), wall_seconds=0.1)
    assert inside.failure.kind is FailureKind.VERIFIER
    assert beyond.failure.kind is FailureKind.TIMEOUT
    assert beyond.num_sampled_tokens == 1


async def test_a_failed_verdict_keeps_the_tokens_and_the_stop_reason():
    trajectory = await play(scorer=RewardScorer([Term("none", lambda prompt, text: None)]))
    assert trajectory.failure.kind is FailureKind.USER_BUG
    assert trajectory.finish_reason is FinishReason.STOP
    assert trajectory.num_sampled_tokens == 1


@pytest.mark.parametrize("method", [hang, raising(ValueError("late"))], ids=["hangs", "raises"])
async def test_a_failing_close_does_not_change_the_verdict(method):
    assert (await play(world=World(close=method), wall_seconds=0.5)).reward == 1.0


async def test_no_reward_from_anywhere_is_a_user_bug():
    assert (await play(scorer=RewardScorer([]))).failure.kind is FailureKind.USER_BUG


async def test_environment_terms_are_added_with_weight_one():
    world = World(step=returning(StepResult(done=True, reward_terms={"speed": 0.25})))
    trajectory = await play(world=world)
    assert trajectory.reward == 1.25
    assert trajectory.reward_terms == {"one": 1.0, "speed": 0.25}


async def test_a_term_named_twice_is_a_user_bug():
    world = World(step=returning(StepResult(done=True, reward_terms={"one": 0.25})))
    assert (await play(world=world)).failure.kind is FailureKind.USER_BUG


async def test_cancelling_an_episode_passes_through_and_closes_the_environment():
    world, started = World(), asyncio.Event()

    async def wait():
        started.set()
        await hang()

    world.methods["step"] = wait
    task = asyncio.create_task(play(world=world))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.closed == 1


async def test_a_coroutine_that_swallows_its_cancellation_is_abandoned():
    release = asyncio.Event()

    async def stubborn():
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(EpisodeError) as caught:
        await guard(
            stubborn,
            what="it",
            kind=FailureKind.ENVIRONMENT,
            seconds=0.05,
            timeout_kind=FailureKind.TIMEOUT,
            limit="the limit",
        )
    release.set()
    assert caught.value.failure.kind is FailureKind.TIMEOUT


class TestFactory:
    def test_single_turn_is_made_anew_each_time(self):
        make = build_environment_factory(EnvironmentConfig())
        first, second = make(), make()
        assert isinstance(first, SingleTurn)
        assert first is not second

    def test_a_class_that_lacks_methods_is_refused_at_start(self):
        with pytest.raises(ConfigError, match="no reset and no step and no close"):
            build_environment_factory(EnvironmentConfig(kind="fractions:Fraction"))

    def test_an_unknown_kind_is_refused_at_start(self):
        with pytest.raises(ConfigError, match="single_turn"):
            build_environment_factory(EnvironmentConfig(kind="single_tern"))

    def test_options_where_none_are_taken_are_refused_at_start(self):
        with pytest.raises(ConfigError, match=r"environment\.options"):
            build_environment_factory(EnvironmentConfig(options={"depth": 1}))
