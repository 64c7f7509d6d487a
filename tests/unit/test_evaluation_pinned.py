"""Case D24: evaluation and training leave each other alone, on a real replica with a scripted engine."""

import asyncio
import contextlib
from collections import Counter

import pytest

from laminar.config.rollout import EngineConfig
from laminar.config.root import LaminarConfig
from laminar.errors import DeadlineError, EngineError
from laminar.types import FinishReason, Prompt, Purpose, WeightVersion, sampled
from rollout.engines.wire import EngineLoad
from rollout.environments.base import Observation, StepResult
from rollout.episode import play_episode
from rollout.evaluation import evaluate
from rollout.generation import Generation
from rollout.player import sampling_for
from rollout.replica import Replica
from rollout.rewards.scorer import RewardScorer
from rollout.scripted import CodePointTokenizer
from rollout.swap_gate import SwapGate

PROMPTS = [Prompt(str(number), f"prompt {number}") for number in range(20)]


class Engine:
    """Process and client in one: answers with the version it holds, item by item as it is let."""

    returncode = None

    def __init__(self):
        self.version, self.let, self.aborted, self.temperatures = WeightVersion(0, 0), asyncio.Event(), 0, Counter()
        self.let.set()

    async def generate(self, input_ids, sampling, request_id, on_segment=None):
        self.temperatures[sampling.temperature, sampling.max_new_tokens] += 1
        await self.let.wait()
        return Generation((sampled([52], [-1.0], self.version),), FinishReason.STOP)

    async def update_weights(self, path, version, flush_cache):
        self.version = version

    async def weight_version(self):
        return self.version

    async def rank_reports(self):
        return []

    async def abort(self, request_id):
        self.aborted += 1

    async def nothing(self, *arguments):
        return None

    async def loads(self):
        return EngineLoad(0, 0, 0, 1, 0)

    pause = resume = health = kill = close = nothing


class Source:
    """One folder under every version's name."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "model.safetensors").write_bytes(b"weights")

    def latest(self):
        return WeightVersion(0, 0)

    @contextlib.contextmanager
    def lease(self, version):
        yield self.folder


class World:
    async def reset(self, prompt):
        return Observation(prompt.content)

    async def step(self, completion):
        return StepResult(done=True, reward_terms={"right": 1.0})

    async def close(self):
        return None


class Player:
    """Plays real episodes, drawn as the config says for their purpose."""

    def __init__(self, config):
        self.config = config

    async def play(self, engine, group, member, attempt, purpose, journal=None):
        return await play_episode(
            group=group, member=member, attempt=attempt, engine=engine, make_environment=World, scorer=RewardScorer([]),
            tokenizer=CodePointTokenizer(), sampling=sampling_for(self.config, purpose), run_seed=0, wall_seconds=5,
            purpose=purpose,
        )  # fmt: skip


def make_config(**evaluation):
    return LaminarConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "eval": evaluation, "rollout": {"engine": {"max_running": 4}}}
    )


@pytest.fixture
async def replica(tmp_path):
    engine = Engine()

    async def start(path, version):
        return engine, engine

    replica = Replica(EngineConfig(), Source(tmp_path), start)
    replica.engine = engine
    await replica.start()
    return replica


async def swap(gate, replica, number):
    async with gate.swap():
        await replica.swap(WeightVersion(0, number))


async def test_an_update_in_the_middle_waits_and_one_version_answers_all_items(replica):
    gate, config, engine = SwapGate(replica), make_config(), replica.engine
    engine.let.clear()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:

        async def measure():
            async with gate.evaluation(0, wait_seconds=1, seconds=5):
                return await evaluate(Player(config), replica, PROMPTS, config)

        measuring = group.create_task(measure())
        while not engine.temperatures:
            await asyncio.sleep(0)
        updating = group.create_task(swap(gate, replica, 1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (engine.version, updating.done()) == (WeightVersion(0, 0), False)
        engine.let.set()
    result = measuring.result()
    assert (len(result.rewards), result.failures, result.version_number, engine.aborted) == (20, {}, 0, 0)
    assert replica.version == WeightVersion(0, 1)
    assert not replica.berths.occupants


async def test_a_version_that_is_awaited_is_not_swapped_away_before_it_is_evaluated(replica):
    """Versions 1, 2, 3 follow at once upon each other; 2 was asked for while 0 was held."""
    gate, config = SwapGate(replica), make_config()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:

        async def measure():
            async with gate.evaluation(2, wait_seconds=5, seconds=5):
                return await evaluate(Player(config), replica, PROMPTS, config)

        async def follow():
            for number in (1, 2, 3):
                await swap(gate, replica, number)

        measuring = group.create_task(measure())
        await asyncio.sleep(0)
        group.create_task(follow())
    assert measuring.result().version_number == 2
    assert replica.version == WeightVersion(0, 3)


async def test_evaluation_samples_with_its_own_temperature_and_limit_and_training_keeps_its_own(replica):
    config = make_config(temperature=0.0, max_new_tokens=7)
    await evaluate(Player(config), replica, PROMPTS[:3], config)
    assert replica.engine.temperatures == {(0.0, 7): 3}
    training = sampling_for(config, Purpose.TRAIN)
    assert (training.temperature, training.max_new_tokens) == (1.0, 512)


async def test_each_sample_of_a_prompt_has_noise_of_its_own_and_the_same_in_every_evaluation(replica):
    config = make_config(samples_per_prompt=3, temperature=1.0)
    seeds = []

    class Watching(Player):
        async def play(self, *arguments):
            trajectory = await super().play(*arguments)
            seeds.append((trajectory.prompt_id, trajectory.member, trajectory.sampling.seed))
            return trajectory

    first = await evaluate(Watching(config), replica, PROMPTS[:2], config)
    drawn, seeds[:] = sorted(seeds), []
    await swap(SwapGate(replica), replica, 1)
    await evaluate(Watching(config), replica, PROMPTS[:2], config)
    assert sorted(seeds) == drawn
    assert len({seed for *_, seed in drawn}) == 6
    assert first.rewards == {"0": [1.0] * 3, "1": [1.0] * 3}


async def test_an_evaluation_has_a_deadline_and_lets_swaps_go_on(replica):
    gate, config = SwapGate(replica), make_config()
    replica.engine.let.clear()
    with pytest.raises(EngineError, match=r"longer than 0\.05 s"):
        async with gate.evaluation(0, wait_seconds=1, seconds=0.05):
            await evaluate(Player(config), replica, PROMPTS[:1], config)
    with pytest.raises(DeadlineError, match="version number 5"):
        async with gate.evaluation(5, wait_seconds=0.01, seconds=5):
            raise AssertionError("there is no version 5")
    await swap(gate, replica, 1)
    assert replica.version == WeightVersion(0, 1)
