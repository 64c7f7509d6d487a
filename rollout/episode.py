"""One episode: an environment played once by an engine, from the first token to the reward, as a trajectory.

Invariants: token ids are the record, text is derived for the environment and the rewards only; whatever goes wrong outside
our own code ends in a trajectory with a failure and its kind, in bounded time; cancellation passes through, once the
environment is closed.
This module does not know leases, weights, sibling episodes, or how an engine is reached.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from laminar.seeds import trajectory_seed
from laminar.types import (
    ClaimedGroup,
    FailureKind,
    FinishReason,
    Prompt,
    Purpose,
    SamplingParameters,
    Trajectory,
    trajectory_id,
)
from rollout.boundary import EpisodeError, guard
from rollout.clock import EpisodeClock
from rollout.environments.base import Environment, Observation, StepResult
from rollout.environments.factory import EnvironmentFactory
from rollout.generation import Generator
from rollout.journal import Journal
from rollout.rewards.base import RewardContext
from rollout.rewards.scorer import RewardScorer, Score, finite_number, summed
from rollout.showing import Showing
from rollout.tokens import Tokenizer
from rollout.transcript import Transcript
from rollout.turn import TurnSampler

logger = logging.getLogger("laminar.rollout")

_CLOSE_SECONDS = 10.0
"""Deadline of an environment's `close`, at most its wall budget."""


async def play_episode(
    *,
    group: ClaimedGroup,
    member: int,
    attempt: int,
    engine: Generator,
    make_environment: EnvironmentFactory,
    scorer: RewardScorer,
    tokenizer: Tokenizer,
    sampling: SamplingParameters,
    run_seed: int,
    wall_seconds: float,
    max_turns: int | None = None,
    max_tokens: int | None = None,
    strict_template: bool = False,
    purpose: Purpose = Purpose.TRAIN,
    worker: str = "",
    journal: Journal | None = None,
) -> Trajectory:
    """Play one member of a group.

    Args:
        group: gives the prompt and the ids.
        member: which sibling, from 0.
        attempt: which try at this member; a new one draws new noise.
        engine: generates tokens.
        make_environment: makes a fresh environment.
        scorer: judges the answer.
        tokenizer: turns observations into ids, and ids into text.
        sampling: how tokens are drawn. Its seed is replaced; `max_new_tokens` is the budget of the whole episode.
        run_seed: seed of the run's sampling noise.
        wall_seconds: budget of the episode, environment and rewards included.
        max_turns: most turns; None: as many as the environment wants.
        max_tokens: most tokens of the trajectory, given ones included; None: not limited.
        strict_template: a chat template that does not write what was sampled is a failure.
        purpose: what the trajectory is for.
        worker: who plays, for the record.
        journal: hears of what is sampled, and knows what an earlier owner of this attempt has left.

    Returns:
        A trajectory with a reward or a failure.
    """
    identity = trajectory_id(group.group_id, member)
    sampling = replace(sampling, seed=trajectory_seed(run_seed, identity, attempt))
    transcript = Transcript()
    episode = _Episode(
        prompt=group.prompt,
        trajectory_id=identity,
        sampler=TurnSampler(engine, tokenizer, sampling, journal, max_tokens),
        scorer=scorer,
        clock=EpisodeClock(wall_seconds),
        transcript=transcript,
        showing=Showing(tokenizer, transcript, max_tokens, strict_template),
        max_turns=max_turns,
    )
    score = await episode.play(make_environment)
    return Trajectory(
        trajectory_id=identity,
        group_id=group.group_id,
        prompt_id=group.prompt.prompt_id,
        member=member,
        attempt=attempt,
        purpose=purpose,
        sampling=sampling,
        chains=episode.transcript.chains(),
        finish_reason=episode.finish_reason,
        reward=score.reward,
        reward_terms=dict(score.terms),
        failure=score.failure,
        turns=episode.transcript.turns,
        timings=episode.clock.timings(),
        worker=worker,
        counts={name: count for name, count in episode.showing.counts.items() if count},
    )


@dataclass(slots=True)
class _Episode:
    prompt: Prompt
    trajectory_id: str
    sampler: TurnSampler
    scorer: RewardScorer
    clock: EpisodeClock
    transcript: Transcript
    showing: Showing
    max_turns: int | None = None
    finish_reason: FinishReason | None = None
    texts: list[str] = field(default_factory=list)
    environment_terms: dict[str, float] = field(default_factory=dict)

    async def play(self, make_environment: EnvironmentFactory) -> Score:
        """The boundary where an episode ends: a score, or a failure with its kind."""
        try:
            async with self._open(make_environment) as environment:
                self.showing.begin(await self._reset(environment))
                while (observation := await self._step(environment, await self._answer())) is not None:
                    if self._is_spent() or not self.showing.go_on(observation):
                        self.finish_reason = self._limit()
                        break
                return await self._judge()
        except EpisodeError as error:
            if error.failure.kind is FailureKind.TIMEOUT:
                self.finish_reason = FinishReason.WALL_TIME
            return Score(None, failure=error.failure)

    @asynccontextmanager
    async def _open(self, make_environment: EnvironmentFactory) -> AsyncIterator[Environment]:
        async def construct() -> Environment:
            return make_environment()

        environment: Environment = await self._call("__init__", construct)
        try:
            yield environment
        finally:
            await self._close(environment)

    async def _close(self, environment: Environment) -> None:
        try:
            await guard(
                environment.close,
                what="environment close",
                kind=FailureKind.ENVIRONMENT,
                seconds=min(_CLOSE_SECONDS, self.clock.wall_seconds),
                timeout_kind=FailureKind.ENVIRONMENT,
                limit="environment.wall_seconds",
            )
        except EpisodeError as error:  # the verdict stands: what the policy did is not changed by a failing clean-up
            logger.warning("trajectory %s: %s", self.trajectory_id, error)

    async def _call(self, method: str, call: Callable[[], Awaitable[Any]]) -> Any:
        with self.clock.book("environment"):
            return await guard(
                call,
                what=f"environment {method}",
                kind=FailureKind.ENVIRONMENT,
                seconds=self.clock.remaining_seconds,
                timeout_kind=FailureKind.TIMEOUT,
                limit="environment.wall_seconds",
            )

    async def _reset(self, environment: Environment) -> Observation:
        observation = await self._call("reset", lambda: environment.reset(self.prompt))
        if not isinstance(observation, Observation):
            raise _nonsense("reset", observation, "an Observation")
        return observation

    async def _answer(self) -> str:
        """Sample a turn; its text."""
        async with self.clock.bound("generate"):
            reason = await self.sampler.sample(self.transcript)
        self.finish_reason = reason
        token_ids = self.transcript.turn_token_ids()
        self.transcript.end_turn(reason)
        self.texts.append(self.sampler.tokenizer.decode(token_ids))
        return self.texts[-1]

    async def _step(self, environment: Environment, answer: str) -> Observation | None:
        """The next observation; None if the episode is over."""
        result = await self._call("step", lambda: environment.step(answer))
        if not isinstance(result, StepResult) or not isinstance(result.reward_terms, Mapping):
            raise _nonsense("step", result, "a StepResult")
        if not all(isinstance(name, str) for name in result.reward_terms):
            raise EpisodeError(FailureKind.USER_BUG, "environment step returned `reward_terms` with a name that is no text")
        for name, value in result.reward_terms.items():
            number = finite_number(value, f"environment step, term {name!r},")
            self.environment_terms[name] = self.environment_terms.get(name, 0.0) + number
        self.showing.counts.update(_whole_counts(result.counts))
        if result.done:
            return None
        if not isinstance(result.observation, Observation):
            raise _nonsense("step", result.observation, "an Observation, or done=True")
        return result.observation

    def _limit(self) -> FinishReason:
        """Which budget ends an episode that its environment has not ended: turns, or else tokens.

        A last turn that was cut is no whole answer, however many turns there may be (case D10).
        """
        is_cut = self.transcript.turns[-1].finish_reason is FinishReason.LENGTH
        return FinishReason.MAX_TURNS if self._is_out_of_turns() and not is_cut else FinishReason.MAX_TOKENS

    def _is_out_of_turns(self) -> bool:
        return self.max_turns is not None and len(self.transcript.turns) >= self.max_turns

    def _is_spent(self) -> bool:
        return self._is_out_of_turns() or self.sampler.budget(self.transcript) <= 0

    async def _judge(self) -> Score:
        """The environment's terms, each of weight 1, and the configured ones."""
        context = RewardContext(
            trajectory_id=self.trajectory_id,
            prompt=self.prompt,
            completion=self.texts[-1],
            turns=tuple(self.texts),
            num_prompt_tokens=self.transcript.turns[0].start,
            num_completion_tokens=self.transcript.num_sampled_tokens,
            finish_reason=self.transcript.turns[-1].finish_reason,
        )
        async with self.clock.bound("reward"):
            score = await self.scorer.score(context)
        if score.reward is None:
            return score
        if twice := self.environment_terms.keys() & score.terms.keys():
            raise EpisodeError(FailureKind.USER_BUG, f"environment and rewards both name a term {min(twice)!r}; rename one")
        if not (self.environment_terms or score.terms or self.scorer.judges_siblings):
            raise EpisodeError(FailureKind.USER_BUG, "neither the environment nor [[rewards]] gave a reward; configure one")
        reward = summed((score.reward, *self.environment_terms.values()))
        return Score(reward, {**score.terms, **self.environment_terms})


def _whole_counts(counts: object) -> dict[str, int]:
    """What a step wants counted, checked."""
    if isinstance(counts, Mapping) and all(isinstance(name, str) and type(count) is int for name, count in counts.items()):
        return dict(counts)
    raise EpisodeError(FailureKind.USER_BUG, "environment step returned `counts` that are no whole numbers by name")


def _nonsense(method: str, value: object, wanted: str) -> EpisodeError:
    return EpisodeError(
        FailureKind.USER_BUG, f"environment {method} returned a {type(value).__name__}; it must return {wanted}"
    )
