"""Evaluation on a worker's engine: one version, every item answered or counted as failed, nothing of training touched."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from laminar.config.root import LaminarConfig
from laminar.config.system import EvalConfig
from laminar.errors import EngineError
from laminar.scores import EvaluationReport, report_rewards
from laminar.types import ClaimedGroup, Prompt, Purpose, Trajectory
from rollout.player import Player
from rollout.replica import Replica

ATTEMPT = 0


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What an evaluation found.

    Attributes:
        version_number: the one version that answered.
        rewards: prompt id → rewards of its answered samples, for every prompt.
        failures: texts of samples whose episode failed, by trajectory id; they are no zeros and in no figure.
        seconds: that the answers took.
    """

    version_number: int
    rewards: dict[str, list[float]]
    failures: dict[str, str]
    seconds: float

    def report(self, config: EvalConfig) -> EvaluationReport:
        """Its figures.

        Raises:
            EngineError: no sample was answered, so there are none.
        """
        if not any(self.rewards.values()):
            first = next(iter(self.failures.values()), "none was asked for")
            raise EngineError(
                f"all {len(self.failures)} answers of version {self.version_number} failed; the first: {first}"
            )
        return report_rewards(
            self.rewards,
            version_number=self.version_number,
            samples_per_prompt=config.samples_per_prompt,
            num_failed=len(self.failures),
            pass_reward=config.pass_reward,
        )


async def evaluate(player: Player, replica: Replica, prompts: Sequence[Prompt], config: LaminarConfig) -> EvaluationResult:
    """Answer each prompt `eval.samples_per_prompt` times, at the evaluation temperature.

    A sample's noise hangs on run seed, prompt and sample number only, so versions are compared on the same noise.

    Raises:
        EngineError: the engine was restarted on other weights meanwhile, so no one version could be measured.
    """
    version, began = replica.version, time.monotonic()
    assert version is not None
    limit = asyncio.Semaphore(config.rollout.engine.max_running)
    samples = tuple(range(config.eval.samples_per_prompt))

    async def answer(prompt: Prompt, sample: int) -> Trajectory:
        async with limit, replica.berths.bind(waits=False):
            item = ClaimedGroup(f"eval-{prompt.prompt_id}", 0, prompt, samples, ATTEMPT)
            return await player.play(replica, item, sample, ATTEMPT, Purpose.EVALUATION)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(prompt, sample)) for prompt in prompts for sample in samples]
    outcomes = [task.result() for task in tasks]
    if mixed := {str(v) for t in outcomes for v in t.versions()} - {str(version)}:
        raise EngineError(f"the evaluation of version {version} was also answered by {', '.join(sorted(mixed))}")
    rewards: dict[str, list[float]] = {prompt.prompt_id: [] for prompt in prompts}
    for trajectory in outcomes:
        if trajectory.reward is not None:
            rewards[trajectory.prompt_id].append(trajectory.reward)
    failures = {t.trajectory_id: t.failure.text for t in outcomes if t.failure is not None}
    return EvaluationResult(version.number, rewards, failures, time.monotonic() - began)
