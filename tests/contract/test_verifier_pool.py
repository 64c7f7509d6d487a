"""Case D21: a verifier away from the main thread, in processes that are killed when they take too long."""

import asyncio
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import pytest

from laminar.config.system import RewardConfig
from laminar.types import FailureKind, Prompt
from rollout.boundary import EpisodeError
from rollout.rewards.base import RewardContext
from rollout.rewards.math_verify import MathVerify
from rollout.rewards.pool import ProcessPool
from rollout.rewards.scorer import build_scorer

ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


def context(gold, answer, name="t"):
    return RewardContext(name, Prompt("p", "?", {"answer": gold}), answer)


def is_gone(pid):
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.fixture
def pool():
    pools = []

    def make(function, size=1, seconds=10.0):
        pools.append(ProcessPool(function, size=size, seconds=seconds))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def test_a_value_comes_back_from_a_process_of_its_own_that_is_kept(pool):
    processes = pool("os:getpid")
    first = processes.call()
    assert first == processes.call() == processes.pids()[0] != os.getpid()


@pytest.mark.slow
def test_what_raises_is_a_failure_of_the_verifier_and_the_process_stays(pool):
    processes = pool("math:sqrt")
    with pytest.raises(EpisodeError, match="ValueError") as caught:
        processes.call(-1)
    (pid,) = processes.pids()
    assert caught.value.failure.kind is FailureKind.VERIFIER
    assert (processes.call(4), processes.pids()) == (2.0, [pid])


def test_what_takes_too_long_is_killed_and_replaced(pool):
    processes = pool("time:sleep", seconds=0.8)
    processes.call(0)
    (pid,) = processes.pids()
    with pytest.raises(EpisodeError, match="took too long") as caught:
        processes.call(60)
    assert caught.value.failure.kind is FailureKind.VERIFIER
    assert is_gone(pid)
    assert processes.call(0) is None


def test_a_process_answers_where_more_than_1024_files_are_open(pool):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert pool("math:sqrt").call(4) == 2.0
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_whose_answer_cannot_be_read_is_ended(pool):
    processes = pool("os:getpid")
    pid = processes.call()
    with pytest.raises(TypeError, match="not JSON serializable"):
        processes.call(object())
    assert (is_gone(pid), processes.pids()) == (True, [])


@pytest.mark.slow
def test_a_process_that_dies_is_a_failure_and_is_replaced(pool):
    processes = pool("os:_exit")
    with pytest.raises(EpisodeError, match="lost its process"):
        processes.call(3)
    assert processes.pids() == []


@pytest.mark.slow
def test_closing_ends_every_process(pool):
    processes = pool("os:getpid", size=2)
    pid = processes.call()
    processes.close()
    assert is_gone(pid)


@pytest.fixture(scope="module")
def verifier():
    reward = MathVerify(MathVerify.Options(max_seconds=5.0))
    yield reward
    reward.pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["main thread", "other thread", "executor"])
def test_the_right_answer_is_right_wherever_the_reward_is_called(verifier, place):
    def judge():
        return verifier.score(context("1/3", r"\boxed{\frac{2}{6}}")), verifier.score(context("1/3", r"\boxed{0.34}"))

    async def in_executor():
        return await asyncio.get_running_loop().run_in_executor(None, judge)

    if place == "main thread":
        assert judge() == (1.0, 0.0)
    elif place == "other thread":
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(judge).result() == (1.0, 0.0)
    else:
        assert asyncio.run(in_executor()) == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("gold", [1e-5, 2.5e-6, 1e16, 1.5, 3.0])
def test_a_float_in_the_data_is_not_read_by_its_mantissa(verifier, gold):
    digits = f"{Decimal(repr(gold)):f}"
    assert verifier.score(context(gold, rf"\boxed{{{digits}}}")) == 1.0
    assert verifier.score(context(gold, rf"\boxed{{{int(gold) + 1}}}")) == 0.0


@pytest.mark.slow
def test_an_empty_reference_is_refused_at_start(verifier):
    assert "'answer' is empty" in verifier.check_prompt(context(" ", "").prompt)


@pytest.mark.slow
async def test_twenty_endless_answers_do_not_keep_twenty_good_ones_from_being_judged():
    scorer = build_scorer([RewardConfig(kind="math_verify", options={"max_seconds": 1.5}, timeout_seconds=60.0)])
    contexts = [context("2", ENDLESS, f"bad-{n}") for n in range(20)] + [context("2", "$2$", f"good-{n}") for n in range(20)]
    scores = await scorer.score_batch(contexts)
    assert {scores[f"bad-{n}"].failure.kind for n in range(20)} == {FailureKind.VERIFIER}
    assert [scores[f"good-{n}"].reward for n in range(20)] == [1.0] * 20
    pool = scorer._terms[0].judge.pool
    assert len(pool.pids()) <= 2
    pids = pool.pids()
    pool.close()
    assert all(map(is_gone, pids))
    assert threading.active_count() < 100
