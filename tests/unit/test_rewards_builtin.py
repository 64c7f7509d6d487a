import time

import pytest

from laminar.config.system import RewardConfig
from laminar.errors import ConfigError
from laminar.types import FailureKind, Prompt
from rollout.rewards.base import RewardContext
from rollout.rewards.exact_match import ExactMatch
from rollout.rewards.regex import RegexMatch
from rollout.rewards.scorer import build_scorer
from rollout.tiny import reward as tiny_reward


async def score(kind, completion, answer, **options):
    scorer = build_scorer([RewardConfig(kind=kind, options=options)])
    return await scorer.score(RewardContext("t", Prompt("p", "?", {"answer": answer}), completion))


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (" 17\n9 + 1", "17", 1.0),
        (" 17", 17, 1.0),
        ("1.5", 1.5, 1.0),
        ("3.0", 3.0, 1.0),
        ("0.00001", 1e-5, 1.0),
        ("\n17", "17", 0.0),
        ("", "17", 0.0),
        ("171", "17", 0.0),
        ("17 ", " 17", 1.0),
    ],
)
async def test_exact_match_compares_the_first_line(completion, answer, reward):
    assert (await score("exact_match", completion, answer)).reward == reward


async def test_exact_match_can_compare_all_lines():
    assert (await score("exact_match", "a\nb\n", "a\nb", first_line=False)).reward == 1.0
    assert ExactMatch(ExactMatch.Options()).extract("a\nb") == "a"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("I say #### 136, no: #### 137", 1.0),
        ("#### 137, no: #### 136", 0.0),
        ("137", 0.0),
        ("", 0.0),
        ("#### 1,37", 1.0),
        ("#### 1", 0.0),
    ],
)
async def test_regex_takes_the_first_group_of_the_last_match(completion, reward):
    assert (await score("regex", completion, "137", pattern=r"#### ([\d,]+)", ignore=",")).reward == reward


async def test_regex_extracts_the_reference_by_its_own_pattern():
    options = {"pattern": r"(\d+)$", "answer_pattern": r"#### (\d+)"}
    assert (await score("regex", "it is 12", "5 + 7\n#### 12", **options)).reward == 1.0


def test_the_extracted_answer_is_whole():
    assert RegexMatch(RegexMatch.Options(pattern=r"answer: (\d+)")).extract("answer: 137.") == "137"
    assert RegexMatch(RegexMatch.Options(pattern=r"\d+")).extract("1 or 137") == "137"
    assert RegexMatch(RegexMatch.Options(pattern=r"\d+")).extract("none") is None


async def test_catastrophic_backtracking_ends_as_a_verifier_failure():
    begin = time.monotonic()
    outcome = await score("regex", "a" * 40 + "!", "x", pattern=r"(a|aa)+$", max_search_seconds=0.2)
    assert outcome.failure.kind is FailureKind.VERIFIER
    assert "0.2 s" in outcome.failure.text
    assert time.monotonic() - begin < 5


def test_a_pattern_that_does_not_compile_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"rewards\.0\.options\.pattern"):
        build_scorer([RewardConfig(kind="regex", options={"pattern": "("})])


async def test_a_missing_answer_column_is_a_failure_not_a_zero():
    scorer = build_scorer([RewardConfig(kind="exact_match")])
    outcome = await scorer.score(RewardContext("t", Prompt("p", "?", {"gold": "1"}), "1"))
    assert outcome.failure.kind is FailureKind.VERIFIER
    assert "gold" in outcome.failure.text


@pytest.mark.parametrize(("completion", "reward"), [("99", 1.0), ("9a59", 0.5), ("\n9", 0.0), ("", 0.0), ("789\n000", 1.0)])
def test_tiny_reward_is_the_share_of_digits_no_smaller(completion, reward):
    assert tiny_reward(Prompt("p", "37>", {"digit": "7"}), completion) == reward
