"""Evaluation on a worker's engine: one version, every item answered or counted as failed, nothing of training touched."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from laminar.config.root import LaminarConfig
from laminar.errors import EngineError
from laminar.types import ClaimedGroup, Prompt, Purpose, Trajectory
from rollout.player import Player
from rollout.replica import Replica


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What an evaluation found.

    Attributes:
        version_number: the one version that answered.
        rewards: prompt id → reward, for every answered item.
        failures: prompt id → text, for items whose episode failed; they are no zeros and stay out of the mean.
    """

    version_number: int
    rewards: dict[str, float]
    failures: dict[str, str]

    @property
    def accuracy(self) -> float:
        """Mean reward over the answered items; 0 if there are none."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else 0.0


async def evaluate(player: Player, replica: Replica, prompts: Sequence[Prompt], config: LaminarConfig) -> EvaluationResult:
    """Answer each prompt once, at the evaluation temperature.

    Raises:
        EngineError: the engine was restarted on other weights meanwhile, so no one version could be measured.
    """
    version = replica.version
    assert version is not None
    limit = asyncio.Semaphore(config.rollout.engine.max_running)

    async def answer(prompt: Prompt) -> Trajectory:
        async with limit, replica.berths.bind(waits=False):
            item = ClaimedGroup(f"eval-{prompt.prompt_id}", 0, prompt, (0,), 0)
            return await player.play(replica, item, 0, 0, Purpose.EVALUATION)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(prompt)) for prompt in prompts]
    outcomes = [task.result() for task in tasks]
    if mixed := {str(v) for t in outcomes for v in t.versions()} - {str(version)}:
        raise EngineError(f"the evaluation of version {version} was also answered by {', '.join(sorted(mixed))}")
    return EvaluationResult(
        version.number,
        {t.prompt_id: t.reward for t in outcomes if t.reward is not None},
        {t.prompt_id: t.failure.text for t in outcomes if t.failure is not None},
    )
