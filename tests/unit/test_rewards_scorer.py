import asyncio
import math
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.config.system import RewardConfig
from laminar.errors import ConfigError, InvariantError
from laminar.types import FailureKind, Prompt
from rollout.boundary import DaemonThreads, EpisodeError
from rollout.rewards.base import RewardContext
from rollout.rewards.exact_match import ExactMatch
from rollout.rewards.regex import RegexMatch
from rollout.rewards.scorer import RewardScorer, Term, build_scorer


def context(completion, trajectory_id="g-000", **fields):
    return RewardContext(trajectory_id, Prompt("p", "?", fields), completion)


def one_term(judge, **settings):
    return RewardScorer([Term("it", judge, **settings)])


class TestWeightedSum:
    async def test_terms_are_weighted_and_kept_unweighted_by_name(self):
        scorer = RewardScorer([Term("a", lambda prompt, text: 3, 0.5), Term("b", lambda prompt, text: True, -2.0)])
        score = await scorer.score(context("x"))
        assert score.reward == 3 * 0.5 + 1 * -2.0
        assert score.terms == {"a": 3.0, "b": 1.0}

    async def test_finite_terms_whose_sum_is_not_are_a_failure(self):
        for terms in ([Term("a", lambda prompt, text: 1e308, 10.0)], [Term(n, lambda prompt, text: -1.7e308) for n in "ab"]):
            score = await RewardScorer(terms).score(context("x"))
            assert score.failure.kind is FailureKind.USER_BUG
            assert "the sum of the reward terms returned" in score.failure.text

    async def test_one_failing_term_fails_the_sum(self):
        scorer = RewardScorer([Term("a", lambda prompt, text: 1.0), Term("b", lambda prompt, text: None)])
        score = await scorer.score(context("x"))
        assert score.reward is None
        assert score.terms == {}

    def test_two_terms_of_one_name_are_refused(self):
        entry = RewardConfig(kind="exact_match")
        with pytest.raises(ConfigError, match="exact_match"):
            build_scorer([entry, entry])


class TestOneFiniteNumber:
    @pytest.mark.parametrize("value", [1, True, 0.25, np.float32(0.25), np.int64(3), np.bool_(False)])
    async def test_numbers_count(self, value):
        score = await one_term(lambda prompt, text: value).score(context("x"))
        assert score.reward == float(value)
        assert type(score.reward) is float

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (math.nan, "nan"),
            (math.inf, "inf"),
            (10**400, "1000"),
            pytest.param(10**5000, "a int", id="5001-digits"),
            (None, "None"),
            ("1", "'1'"),
            ([1.0], "[1.0]"),
            ({}, "dict"),
        ],
    )
    async def test_nonsense_is_a_user_bug_that_shows_the_value(self, value, shown):
        score = await one_term(lambda prompt, text: value).score(context("x"))
        assert score.reward is None
        assert score.failure.kind is FailureKind.USER_BUG
        assert shown in score.failure.text


class Panic(BaseException):
    """Like a panic of an extension in Rust, which is no `Exception`."""


class TestWhatEscapes:
    async def test_raising_is_a_user_bug_with_error_and_place(self):
        def judge(prompt, text):
            raise KeyError("answr")

        failure = (await one_term(judge).score(context("x"))).failure
        assert failure.kind is FailureKind.USER_BUG
        assert "KeyError" in failure.text
        assert "answr" in failure.text
        assert "test_rewards_scorer.py" in failure.text

    @pytest.mark.parametrize("error", [ConnectionError("judge down"), TimeoutError("slow"), OSError("disk")])
    async def test_an_unreachable_judge_is_a_verifier_failure(self, error):
        async def judge(prompt, text):
            raise error

        assert (await one_term(judge).score(context("x"))).failure.kind is FailureKind.VERIFIER

    @pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError(), Panic("unwrap on None")])
    async def test_exit_panic_and_stray_cancellation_do_not_end_the_worker(self, error):
        async def judge(prompt, text):
            raise error

        assert (await one_term(judge).score(context("x"))).failure.kind is FailureKind.USER_BUG

    @pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), Panic("unwrap on None")])
    async def test_what_a_thread_raises_is_told_at_once_and_does_not_end_the_worker(self, error):
        def judge(prompt, text):
            raise error

        failure = (await one_term(judge).score(context("x"))).failure
        assert failure.kind is FailureKind.USER_BUG
        assert type(error).__name__ in failure.text

    async def test_a_judge_may_name_the_kind_itself(self):
        def judge(prompt, text):
            raise EpisodeError(FailureKind.TOOL, "sandbox lost")

        assert (await one_term(judge).score(context("x"))).failure.kind is FailureKind.TOOL

    async def test_a_hanging_thread_is_a_verifier_failure_within_its_timeout(self):
        release = threading.Event()
        failure = (await one_term(lambda prompt, text: release.wait(), timeout_seconds=0.05).score(context("x"))).failure
        release.set()
        assert failure.kind is FailureKind.VERIFIER
        assert "0.05" in failure.text

    async def test_a_hanging_coroutine_is_a_verifier_failure_within_its_timeout(self):
        async def judge(prompt, text):
            await asyncio.Event().wait()

        failure = (await one_term(judge, timeout_seconds=0.05).score(context("x"))).failure
        assert failure.kind is FailureKind.VERIFIER

    @pytest.mark.parametrize("seconds", [None, math.nan, "1", KeyError("tests")])
    async def test_extra_seconds_that_are_no_number_are_the_users_bug(self, seconds):
        class Judge:
            def extra_seconds(self, context):
                if isinstance(seconds, Exception):
                    raise seconds
                return seconds

            def score(self, context):
                return 1.0

        failure = (await one_term(Judge()).score(context("x"))).failure
        assert failure.kind is FailureKind.USER_BUG
        assert "extra_seconds of reward 'it'" in failure.text

    async def test_the_wait_for_a_place_of_a_coroutine_does_not_count_as_its_time(self):
        judge = OneAtOnce()
        scorer = one_term(judge, timeout_seconds=0.1)
        scores = await scorer.score_batch([context("hang", "t0"), context("hang", "t1"), context("good", "t2")])
        assert [score.reward for score in scores.values()] == [None, None, 1.0]
        assert judge.most_running == 1

    async def test_hung_threads_do_not_use_up_the_pool(self):
        # Case D21: 20 bad answers, then 20 good ones, through two places.
        release = threading.Event()
        threads = DaemonThreads(max_running=2, max_stuck=64)
        bad_scorer = one_term(lambda prompt, text: release.wait(), timeout_seconds=0.02, threads=threads)
        good_scorer = one_term(lambda prompt, text: 1.0, threads=threads)
        bad = await bad_scorer.score_batch([context("bad", f"b{n}") for n in range(20)])
        good = await good_scorer.score_batch([context("good", f"g{n}") for n in range(20)])
        release.set()
        assert {score.failure.kind for score in bad.values()} == {FailureKind.VERIFIER}
        assert [score.reward for score in good.values()] == [1.0] * 20

    async def test_threads_that_never_return_stop_piling_up(self):
        release, entered = threading.Event(), threading.Semaphore(0)

        def hang(prompt, text):
            entered.release()
            release.wait()

        scorer = one_term(hang, timeout_seconds=0.02, threads=DaemonThreads(max_stuck=2))
        texts = [(await scorer.score(context("x"))).failure.text for _ in range(4)]
        assert ["never returned" in text for text in texts] == [False, False, True, True]
        assert entered.acquire(timeout=10)
        assert entered.acquire(timeout=10)
        assert not entered.acquire(blocking=False)
        release.set()

    async def test_evicted_calls_that_will_return_in_time_refuse_nobody(self):
        release, entered = threading.Event(), threading.Semaphore(0)

        def judge(prompt, text):
            if text == "slow":
                entered.release()
                release.wait()
            return 1.0

        scorer = one_term(judge, threads=DaemonThreads(max_stuck=2))
        evicted = [asyncio.create_task(scorer.score(context("slow"))) for _ in range(2)]
        for _ in evicted:
            assert await asyncio.to_thread(entered.acquire, timeout=10)
        for task in evicted:
            task.cancel()
        await asyncio.wait(evicted)
        score = await scorer.score(context("quick"))
        release.set()
        assert score.reward == 1.0

    @pytest.mark.parametrize(("deadline", "is_refused"), [(0.0, True), (math.inf, False)])
    async def test_a_thread_nobody_waits_for_is_stuck_from_its_deadline_on(self, deadline, is_refused):
        release, entered = threading.Event(), threading.Event()

        def hang():
            entered.set()
            release.wait()

        threads = DaemonThreads(max_stuck=1)
        evicted = asyncio.create_task(threads.run(hang, deadline=deadline))
        assert await asyncio.to_thread(entered.wait, 10)
        evicted.cancel()
        await asyncio.wait([evicted])
        with pytest.raises(EpisodeError, match="1 earlier calls never returned") if is_refused else nullcontext():
            assert await threads.run(lambda: 7) == 7
        release.set()


class OneAtOnce:
    """Hangs on the answer "hang"."""

    max_running = 1

    def __init__(self):
        self.num_running = self.most_running = 0

    async def score(self, context):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if context.completion == "hang":
                await asyncio.Event().wait()
            return 1.0
        finally:
            self.num_running -= 1


class Shuffled:
    """Finishes in an order of its own."""

    async def score(self, context):
        for _ in range(hash(context.trajectory_id) % 7):
            await asyncio.sleep(0)
        return float(context.completion == "right")


class Batched:
    def __init__(self, extra=0):
        self.extra = extra

    async def score_batch(self, contexts):
        scores = [float(context.completion == "right") for context in contexts]
        return scores + [0.0] * self.extra if self.extra >= 0 else scores[: self.extra]


class TestOneAnswerInOneScoreOut:
    @pytest.mark.parametrize("judge", [Shuffled(), Batched()], ids=["single", "batch"])
    async def test_five_answers_of_case_d22(self, judge):
        answers = ["wrong", "\\unparsable{", "right", "\\unparsable{", "right"]
        scores = await one_term(judge).score_batch([context(a, f"t{n}") for n, a in enumerate(answers)])
        assert {name: score.reward for name, score in scores.items()} == {"t0": 0, "t1": 0, "t2": 1, "t3": 0, "t4": 1}
        assert sum(score.reward for score in scores.values()) / len(scores) == pytest.approx(0.4)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.sampled_from(["", "137", "1", None, b"137", 137, "x" * 1_000_000]), min_size=1, max_size=50))
    def test_score_i_belongs_to_trajectory_i(self, answers):
        scorer = RewardScorer(
            [Term("exact", ExactMatch(ExactMatch.Options()), failure_kind=FailureKind.VERIFIER), Term("order", Shuffled())]
        )
        contexts = [context(answer, f"t{n}", answer="137") for n, answer in enumerate(answers)]
        scores = asyncio.run(scorer.score_batch(contexts))
        assert list(scores) == [f"t{n}" for n in range(len(answers))]
        for answer, score in zip(answers, scores.values(), strict=True):
            if isinstance(answer, str):
                assert score.terms["exact"] == (answer == "137")
            else:
                assert score.failure.kind is FailureKind.VERIFIER

    @pytest.mark.parametrize("extra", [-1, 1])
    async def test_a_batch_of_the_wrong_count_is_refused_whole(self, extra):
        scores = await one_term(Batched(extra)).score_batch([context("right", f"t{n}") for n in range(3)])
        assert {score.failure.kind for score in scores.values()} == {FailureKind.USER_BUG}
        assert all(f"{3 + extra} values for 3 answers" in score.failure.text for score in scores.values())

    async def test_a_single_answer_with_two_values_is_refused(self):
        failure = (await one_term(Batched(1)).score(context("right"))).failure
        assert "2 values for 1 answers" in failure.text

    async def test_one_bad_value_in_a_batch_fails_only_its_own_answer(self):
        class Holey:
            async def score_batch(self, contexts):
                return [1.0, math.nan, 0.5]

        scores = await one_term(Holey()).score_batch([context("x", f"t{n}") for n in range(3)])
        assert [score.reward for score in scores.values()] == [1.0, None, 0.5]

    async def test_two_answers_of_one_id_break_an_invariant(self):
        with pytest.raises(InvariantError):
            await one_term(Shuffled()).score_batch([context("a"), context("b")])


class TestChecksAtStart:
    @pytest.mark.parametrize("kind", [ExactMatch(ExactMatch.Options()), RegexMatch(RegexMatch.Options(pattern="x"))])
    @pytest.mark.parametrize("fields", [{}, {"answer": None}, {"answer": [1]}, {"answer": True}])
    def test_a_prompt_without_a_usable_answer_is_named(self, kind, fields):
        with pytest.raises(ConfigError, match=r"'it'.*prompt p.*answer"):
            one_term(kind).check([Prompt("p", "?", fields)])

    def test_a_class_without_score_is_refused(self):
        with pytest.raises(ConfigError, match="no `score`, `score_batch` or `score_group`"):
            build_scorer([RewardConfig(kind="fractions:Fraction")])
