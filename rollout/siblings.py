"""Hands in a group's trajectories: each as it ends, or, where a reward compares siblings, all good ones together.

With such a reward a member that has ended waits for those still being played. Failures are handed in at once, so that the
data module can have a member played again, or let the group go. When none is left to wait for, the siblings are judged and
handed in by one script: after a death they are all there, judged once, or none is, and all are played again.
It does not know how members are played or what a group is trained on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from laminar.experience.answers import SubmitOutcome
from laminar.types import FailureKind, Prompt, Trajectory
from rollout.boundary import EpisodeError
from rollout.rewards.base import RewardContext
from rollout.rewards.scorer import RewardScorer, Score, summed
from rollout.tokens import Tokenizer

Judge = Callable[[Sequence[Trajectory]], Awaitable[list[Trajectory]]]
Submit = Callable[[Sequence[Trajectory]], Awaitable[list[SubmitOutcome]]]


class Siblings:
    """The members of one claimed group.

    Args:
        num_members: how many are played.
        submit: hands trajectories in, all or none.
        judge: gives siblings their group rewards; None if no reward compares them.
    """

    def __init__(self, num_members: int, submit: Submit, judge: Judge | None) -> None:
        self._num_open = num_members
        self._submit, self._judge = submit, judge
        self._waiting: list[tuple[Trajectory, asyncio.Future[tuple[Trajectory, SubmitOutcome]]]] = []

    async def hand_in(self, trajectory: Trajectory) -> tuple[Trajectory, SubmitOutcome]:
        """Hand in one member's trajectory.

        Returns:
            The trajectory as it was handed in, and what became of it. After `replay` the member is to be handed in again.
        """
        if self._judge is None:
            (outcome,) = await self._submit([trajectory])
            return trajectory, outcome
        if trajectory.failure is not None:
            (outcome,) = await self._submit([trajectory])
            if outcome is not SubmitOutcome.REPLAY:
                self._num_open -= 1
                await self._settle()
            return trajectory, outcome
        ended = asyncio.get_running_loop().create_future()
        self._waiting.append((trajectory, ended))
        await self._settle()
        return await ended

    async def _settle(self) -> None:
        """Judge and hand in those that wait, once nobody else is played."""
        if self._judge is None or not self._waiting or len(self._waiting) < self._num_open:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda one: one[0].member), []
        judged = await self._judge([trajectory for trajectory, _ in waiting])
        outcomes = await self._submit(judged)
        for (_, ended), trajectory, outcome in zip(waiting, judged, outcomes, strict=True):
            self._num_open -= outcome is not SubmitOutcome.REPLAY
            ended.set_result((trajectory, outcome))


async def judge_siblings(
    scorer: RewardScorer, tokenizer: Tokenizer, prompt: Prompt, trajectories: Sequence[Trajectory], max_attempts: int
) -> list[Trajectory]:
    """Add what the scorer's group terms say of a group's good members; or fail them all, with the reason.

    Args:
        scorer: has the group terms.
        tokenizer: makes text of what was sampled.
        prompt: the group's.
        trajectories: its members that have a reward, by member.
        max_attempts: how often judging is tried, unless the fault is a bug.
    """
    contexts = [_context(trajectory, prompt, tokenizer) for trajectory in trajectories]
    begin = time.monotonic()
    for _ in range(max_attempts):
        scores = await scorer.score_siblings(contexts)
        failures = [score.failure for score in scores.values() if score.failure is not None]
        if not failures or failures[0].kind is FailureKind.USER_BUG:
            break
    seconds = time.monotonic() - begin
    return [_judged(trajectory, scores[trajectory.trajectory_id], seconds) for trajectory in trajectories]


def _context(trajectory: Trajectory, prompt: Prompt, tokenizer: Tokenizer) -> RewardContext:
    ids = [chain.token_ids() for chain in trajectory.chains]
    turns = trajectory.turns
    texts = tuple(tokenizer.decode(ids[turn.chain][turn.start : turn.end]) for turn in turns)
    return RewardContext(
        trajectory_id=trajectory.trajectory_id,
        prompt=prompt,
        completion=texts[-1],
        turns=texts,
        num_prompt_tokens=turns[0].start,
        num_completion_tokens=trajectory.num_sampled_tokens,
        finish_reason=turns[-1].finish_reason,
        terms=dict(trajectory.reward_terms),
    )


def _judged(trajectory: Trajectory, score: Score, seconds: float) -> Trajectory:
    timings = replace(
        trajectory.timings,
        reward_seconds=trajectory.timings.reward_seconds + seconds,
        total_seconds=trajectory.timings.total_seconds + seconds,
    )
    failure, reward = score.failure, None
    if score.reward is not None and trajectory.reward is not None:
        try:
            reward = summed((trajectory.reward, score.reward))
        except EpisodeError as error:
            failure = error.failure
    if reward is None:
        return replace(trajectory, reward=None, reward_terms={}, failure=failure, timings=timings)
    terms = {**trajectory.reward_terms, **score.terms}
    return replace(trajectory, reward=reward, reward_terms=terms, timings=timings)
