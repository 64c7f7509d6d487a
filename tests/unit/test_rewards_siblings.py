"""Group rewards: siblings judged in one call, when the last has ended; case D22 for groups."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from laminar.config.system import RewardConfig
from laminar.experience.answers import SubmitOutcome
from laminar.types import (
    Chain,
    Failure,
    FailureKind,
    FinishReason,
    Prompt,
    Purpose,
    SamplingParameters,
    Trajectory,
    Turn,
    WeightVersion,
    given,
    sampled,
)
from rollout.boundary import EpisodeError
from rollout.rewards.base import RewardContext
from rollout.rewards.relative_length import RelativeLength
from rollout.rewards.scorer import RewardScorer, Term, build_scorer
from rollout.scripted import CodePointTokenizer
from rollout.siblings import Siblings, judge_siblings

PROMPT = Prompt("p", "?", {"answer": "7"})


def played(member, text="7", **changes):
    ids = [ord(character) for character in text]
    chain = Chain((given([63]), sampled(ids, [-1.0] * len(ids), WeightVersion(0, 0))))
    trajectory = Trajectory(
        f"g-{member:03d}", "g", "p", member, 0, Purpose.TRAIN, SamplingParameters(1.0, 9, 0), (chain,), FinishReason.STOP,
        1.0, {"exact": 1.0}, turns=(Turn(0, 1, 1 + len(ids), FinishReason.STOP),),
    )  # fmt: skip
    return replace(trajectory, **changes)


def broken(member, kind=FailureKind.TIMEOUT):
    return played(member, reward=None, reward_terms={}, failure=Failure(kind, "late"))


class Together:
    """A group reward that answers what it is told to, call by call."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []

    async def score_group(self, contexts):
        self.calls.append(list(contexts))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def scorer_of(judge, **settings):
    return RewardScorer([Term("rank", judge, **settings)])


async def judged(judge, *trajectories, max_attempts=1, **settings):
    return await judge_siblings(scorer_of(judge, **settings), CodePointTokenizer(), PROMPT, trajectories, max_attempts)


async def test_all_siblings_are_seen_in_one_call_with_what_they_have_been_given():
    judge = Together([0.5, -0.5])
    first, second = await judged(
        judge, played(0, "7"), played(2, "a 7", reward=0.0, reward_terms={"exact": 0.0}), weight=2.0
    )
    ((one, two),) = judge.calls
    assert (one.completion, two.completion, two.turns) == ("7", "a 7", ("a 7",))
    assert (one.terms, two.terms) == ({"exact": 1.0}, {"exact": 0.0})
    assert (one.num_prompt_tokens, two.num_completion_tokens) == (1, 3)
    assert (first.reward, first.reward_terms) == (1.0 + 2.0 * 0.5, {"exact": 1.0, "rank": 0.5})
    assert (second.reward, second.reward_terms) == (2.0 * -0.5, {"exact": 0.0, "rank": -0.5})


@pytest.mark.parametrize(
    "values", [[1.0], [1.0, 2.0, 3.0], [1.0, None], [1.0, float("nan")], 1.0, np.asarray(1.0), [1.0, [2.0]]]
)
async def test_anything_but_one_number_for_each_fails_the_whole_group_as_a_bug(values):
    trajectories = await judged(Together(values), played(0), played(1), max_attempts=3)
    assert [t.failure.kind for t in trajectories] == [FailureKind.USER_BUG] * 2
    assert [(t.reward, t.reward_terms) for t in trajectories] == [(None, {})] * 2


async def test_siblings_whose_sum_is_not_finite_have_failed():
    high, low = await judged(Together([1.7e308, 0.5]), played(0, reward=1.7e308), played(1))
    assert (high.reward, high.failure.kind) == (None, FailureKind.USER_BUG)
    assert low.reward == 1.5


async def test_a_verifier_out_of_reach_is_asked_again_with_the_same_answers():
    judge = Together(OSError("refused"), EpisodeError(FailureKind.VERIFIER, "busy"), [1.0, 2.0])
    trajectories = await judged(judge, played(0), played(1), max_attempts=3)
    assert [t.reward for t in trajectories] == [2.0, 3.0]
    judge = Together(OSError("refused"), OSError("refused"))
    trajectories = await judged(judge, played(0), played(1), max_attempts=2)
    assert [t.failure.kind for t in trajectories] == [FailureKind.VERIFIER] * 2
    assert len(judge.calls) == 2


class Desk:
    """What the data module answers: `accepted`, but `replay` for the failures of the given members, once each."""

    def __init__(self, *replays):
        self.replays, self.calls = list(replays), []

    async def submit(self, trajectories):
        self.calls.append([(t.member, t.failure is None) for t in trajectories])
        return [self._outcome(t) for t in trajectories]

    def _outcome(self, trajectory):
        if trajectory.failure is not None and trajectory.member in self.replays:
            self.replays.remove(trajectory.member)
            return SubmitOutcome.REPLAY
        return SubmitOutcome.ACCEPTED


def desk_and_siblings(num_members, judge, *replays):
    desk = Desk(*replays)

    async def judge_them(trajectories):
        return await judged(judge, *trajectories)

    return desk, Siblings(num_members, desk.submit, judge_them if judge else None)


async def test_without_a_group_reward_each_is_handed_in_as_it_ends():
    desk, siblings = desk_and_siblings(2, None)
    assert await siblings.hand_in(played(1)) == (played(1), "accepted")
    assert desk.calls == [[(1, True)]]


async def test_the_good_ones_wait_for_the_last_and_go_together_in_member_order():
    judge = Together([1.0, 2.0, 3.0])
    desk, siblings = desk_and_siblings(3, judge)
    waiting = [asyncio.create_task(siblings.hand_in(played(member))) for member in (2, 0)]
    await asyncio.sleep(0)
    assert desk.calls == []
    last, outcome = await siblings.hand_in(played(1))
    assert desk.calls == [[(0, True), (1, True), (2, True)]]
    assert (last.reward, outcome) == (1.0 + 2.0, "accepted")
    assert [(await task)[0].reward for task in waiting] == [1.0 + 3.0, 1.0 + 1.0]


async def test_a_failure_goes_at_once_and_may_be_the_one_that_was_waited_for():
    judge = Together([1.0])
    desk, siblings = desk_and_siblings(2, judge)
    waiting = asyncio.create_task(siblings.hand_in(played(0)))
    await asyncio.sleep(0)
    await siblings.hand_in(broken(1))
    assert (await waiting)[0].reward == 2.0
    assert desk.calls == [[(1, False)], [(0, True)]]


async def test_a_member_that_is_played_again_is_waited_for():
    judge = Together([1.0, 2.0])
    _, siblings = desk_and_siblings(2, judge, 1)
    waiting = asyncio.create_task(siblings.hand_in(played(0)))
    await asyncio.sleep(0)
    assert (await siblings.hand_in(broken(1)))[1] == "replay"
    assert not waiting.done()
    await siblings.hand_in(played(1))
    assert (await waiting)[0].reward == 2.0
    assert [len(call) for call in judge.calls] == [2]


async def test_members_whose_judging_failed_are_played_again_and_judged_together_again():
    judge = Together(OSError("refused"), [1.0, 2.0])
    desk, siblings = desk_and_siblings(2, judge, 0, 1)
    first = [asyncio.create_task(siblings.hand_in(played(member))) for member in (0, 1)]
    assert [(await task)[1] for task in first] == ["replay", "replay"]
    again = [asyncio.create_task(siblings.hand_in(played(member))) for member in (0, 1)]
    assert [(await task)[0].reward for task in again] == [2.0, 3.0]
    assert desk.calls == [[(0, False), (1, False)], [(0, True), (1, True)]]


def lengths(*pairs):
    return [
        RewardContext(str(n), PROMPT, "", num_completion_tokens=length, terms={"exact_match": float(right)})
        for n, (length, right) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("pairs", "worth"),  # by hand from the paper's formula
    [
        ([(10, True), (20, True), (30, True)], [0.5, 0.0, -0.5]),
        ([(10, False), (20, False), (30, False)], [0.0, 0.0, -0.5]),
        ([(10, False), (30, True), (15, True)], [0.0, -0.5, 0.25]),
        ([(10, True), (10, False)], [0.0, 0.0]),
        ([(10, True)], [0.0]),
    ],
)
async def test_relative_length_is_the_papers(pairs, worth):
    assert await RelativeLength(RelativeLength.Options()).score_group(lengths(*pairs)) == worth


async def test_relative_length_works_beside_the_term_it_names_only():
    entries = [RewardConfig(kind="exact_match"), RewardConfig(kind="relative_length")]
    scorer = build_scorer(entries)
    contexts = lengths((1, True), (3, True))
    assert [score.reward for score in (await scorer.score_siblings(contexts)).values()] == [0.5, -0.5]
    assert {tuple(score.terms) for score in (await scorer.score_batch(contexts)).values()} == {("exact_match",)}
    alone = build_scorer([RewardConfig(kind="relative_length", options={"right_term": "solved"})])
    (score, _) = (await alone.score_siblings(contexts)).values()
    assert (score.failure.kind, "KeyError" in score.failure.text) == (FailureKind.VERIFIER, True)
