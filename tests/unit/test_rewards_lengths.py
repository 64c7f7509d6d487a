"""Rewards `overlong` and `format`."""

import pytest
from pydantic import ValidationError

from laminar.types import Prompt
from rollout.rewards.base import RewardContext
from rollout.rewards.format import Format
from rollout.rewards.overlong import Overlong


def context(*turns, num_tokens=0):
    return RewardContext("t", Prompt("p", "?"), turns[-1], turns=turns, num_completion_tokens=num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    # The paper's own numbers: at most 16,384 fair, 4,096 more with a growing penalty.
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
async def test_the_penalty_grows_evenly_over_the_cache(num_tokens, penalty):
    reward = Overlong(Overlong.Options(max_tokens=20480, cache_tokens=4096))
    assert await reward.score(context("x", num_tokens=num_tokens)) == penalty


def test_a_cache_larger_than_the_limit_is_refused():
    with pytest.raises(ValidationError, match="cache_tokens 5 is above max_tokens 4"):
        Overlong.Options(max_tokens=4, cache_tokens=5)


@pytest.mark.parametrize(
    ("text", "score"),
    [("<think>a\nb</think> 7", 1.0), ("  <think></think>7\n", 1.0), ("7", 0.0), ("<think>a</think>", 0.0), ("", 0.0)],
)
def test_the_whole_answer_must_match(text, score):
    assert Format(Format.Options(pattern=r"<think>.*</think>\s*\d+")).score(context(text)) == score


def test_every_turn_must_match_where_asked_for():
    assert Format(Format.Options(pattern=r"\d")).score(context("a", "1")) == 1.0
    assert Format(Format.Options(pattern=r"\d", every_turn=True)).score(context("a", "1")) == 0.0


def test_a_pattern_that_searches_for_ever_is_a_timeout():
    reward = Format(Format.Options(pattern="(a|aa)+", max_search_seconds=0.01))
    with pytest.raises(TimeoutError):
        reward.score(context("a" * 40 + "!"))


def test_a_broken_pattern_is_refused():
    with pytest.raises(ValidationError, match="not a regular expression"):
        Format.Options(pattern="(")
