"""The types: a resumed generation (case D12), stop reasons (case D10), and states that cannot be built."""

import dataclasses
import math

import numpy as np
import pytest

from laminar.errors import InvariantError
from laminar.types import (
    Chain,
    Failure,
    FailureKind,
    FinishReason,
    Purpose,
    SamplingParameters,
    Segment,
    Trajectory,
    WeightVersion,
    given,
    sampled,
    trajectory_id,
)

V3, V4, V6 = WeightVersion(0, 3), WeightVersion(0, 4), WeightVersion(0, 6)
SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=8, seed=1)


def trajectory(*segments: Segment, finish_reason: FinishReason | None = FinishReason.STOP, **changes: object) -> Trajectory:
    fields: dict[str, object] = {
        "trajectory_id": "00000001-000",
        "group_id": "00000001",
        "prompt_id": "p",
        "member": 0,
        "attempt": 0,
        "purpose": Purpose.TRAIN,
        "sampling": SAMPLING,
        "chains": (Chain(segments),),
        "finish_reason": finish_reason,
        "reward": 1.0,
        **changes,
    }
    return Trajectory(**fields)  # type: ignore[arg-type]


# ---- case D12: interrupted at version 3, at 4, while queued at 6, finished at 6


def resumed(mask_older: bool = False) -> tuple[Segment, ...]:
    return (
        given([1, 2]),
        sampled([11, 12, 13], [-0.1, -0.2, -0.3], V3, masked_head_tokens=3 if mask_older else 0),
        sampled([14, 15], [-0.4, -0.5], V4, masked_head_tokens=2 if mask_older else 0),
        sampled([], [], V6),
        sampled([16], [-0.6], V6),
    )


def test_every_array_of_a_resumed_generation_has_one_length() -> None:
    chain = Chain(resumed())
    assert chain.num_tokens == 8
    assert {len(chain.token_ids()), len(chain.mask()), len(chain.rollout_logprobs()), len(chain.version_numbers())} == {8}


def test_a_resumed_generation_keeps_what_each_version_sampled() -> None:
    chain = Chain(resumed())
    assert chain.token_ids().tolist() == [1, 2, 11, 12, 13, 14, 15, 16]
    assert chain.version_numbers().tolist() == [-1, -1, 3, 3, 3, 4, 4, 6]
    assert chain.mask().tolist() == [False] * 2 + [True] * 6
    received = np.asarray([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6], np.float32)
    assert chain.rollout_logprobs()[2:].tobytes() == received.tobytes()
    assert np.isnan(chain.rollout_logprobs()[:2]).all()


def test_older_parts_can_be_masked_without_changing_any_length() -> None:
    assert Chain(resumed(mask_older=True)).mask().tolist() == [False] * 7 + [True]


def test_a_resumed_trajectory_is_as_old_as_its_oldest_token() -> None:
    found = trajectory(*resumed())
    assert (found.oldest, found.newest) == (V3, V6)
    assert (found.num_tokens, found.num_sampled_tokens) == (8, 6)


def test_a_part_without_tokens_has_no_say_in_the_age() -> None:
    found = trajectory(given([1]), sampled([], [], V3), sampled([5], [-1.0], V4))
    assert (found.oldest, found.newest) == (V4, V4)


def test_age_goes_by_number_across_lineages() -> None:
    found = trajectory(sampled([5], [-1.0], WeightVersion(1, 3)), sampled([6], [-1.0], WeightVersion(0, 5)))
    assert (found.oldest, found.newest) == (WeightVersion(1, 3), WeightVersion(0, 5))


# ---- case D10: end ids {20, 21}, cap 4; the stop reason decides, never the last id

D10 = [
    ([5, 6, 20], FinishReason.STOP, False),
    ([5, 21], FinishReason.STOP, False),
    ([5, 6, 7, 8], FinishReason.LENGTH, True),
    ([5, 6, 7, 20], FinishReason.STOP, False),  # stopped exactly at the cap
]


def d10() -> list[Trajectory]:
    return [trajectory(sampled(ids, [-1.0] * len(ids), V3), finish_reason=reason) for ids, reason, _ in D10]


def test_the_stop_reason_alone_says_truncated() -> None:
    assert [t.is_truncated for t in d10()] == [truncated for *_, truncated in D10]


def test_the_end_token_is_trained_even_if_it_is_the_pad_token() -> None:
    masks = [t.chains[0].mask().tolist() for t in d10()]
    assert masks == [[True] * 3, [True] * 2, [True] * 4, [True] * 4]


def test_lengths_and_shares_count_every_end_id() -> None:
    found = d10()
    finished = [t.num_sampled_tokens for t in found if not t.is_truncated]
    assert sum(t.is_truncated for t in found) / 4 == 0.25
    assert sum(t.num_sampled_tokens for t in found) / 4 == 3.25
    assert sum(finished) / len(finished) == 3.0
    assert (sum(t.num_sampled_tokens for t in found), sum(finished)) == (13, 9)


@pytest.mark.parametrize(
    ("reason", "truncated"),
    [
        (FinishReason.STOP, False),
        (FinishReason.LENGTH, True),
        (FinishReason.ABORT, False),
        (FinishReason.MAX_TURNS, False),
        (FinishReason.MAX_TOKENS, True),
        (FinishReason.WALL_TIME, False),
        (None, False),
    ],
)
def test_only_length_limits_truncate(reason: FinishReason | None, truncated: bool) -> None:
    assert trajectory(sampled([5], [-1.0], V3), finish_reason=reason).is_truncated is truncated


# ---- what cannot be built


def test_a_segment_is_sampled_with_log_probs_or_given_without() -> None:
    ids = np.asarray([1, 2], np.int32)
    with pytest.raises(InvariantError, match="neither"):
        Segment(ids, None, V3)
    with pytest.raises(InvariantError, match="neither"):
        Segment(ids, np.zeros(2, np.float32), None)


@pytest.mark.parametrize("logprobs", [np.zeros(1, np.float32), np.zeros(2, np.float64), np.zeros((1, 2), np.float32)])
def test_a_sampled_segment_has_one_float32_log_prob_a_token(logprobs: np.ndarray) -> None:
    with pytest.raises(InvariantError, match="one float32 log-prob for every token id"):
        Segment(np.asarray([1, 2], np.int32), logprobs, V3)


@pytest.mark.parametrize("ids", [np.asarray([1, 2], np.int64), np.zeros((1, 2), np.int32)])
def test_token_ids_are_one_row_of_int32(ids: np.ndarray) -> None:
    with pytest.raises(InvariantError, match=r"\(T,\) int32"):
        Segment(ids)


@pytest.mark.parametrize("masked", [-1, 3])
def test_no_more_tokens_are_masked_than_there_are(masked: int) -> None:
    with pytest.raises(InvariantError, match="masked_head_tokens"):
        sampled([1, 2], [-1.0, -1.0], V3, masked_head_tokens=masked)


def test_a_given_segment_has_nothing_to_mask() -> None:
    with pytest.raises(InvariantError, match="masked_head_tokens"):
        Segment(np.asarray([1], np.int32), masked_head_tokens=1)


def test_a_trajectory_ends_with_a_reward_or_a_failure() -> None:
    failure = Failure(FailureKind.TIMEOUT, "30 s")
    with pytest.raises(InvariantError, match="exactly one"):
        trajectory(sampled([5], [-1.0], V3), reward=None)
    with pytest.raises(InvariantError, match="exactly one"):
        trajectory(sampled([5], [-1.0], V3), failure=failure)
    assert trajectory(reward=None, failure=failure, finish_reason=None).oldest is None


def test_a_failure_can_be_stored_whatever_its_text_quotes() -> None:
    assert Failure(FailureKind.TOOL, "cannot open caf\ud83d, é, 😀").text == "cannot open caf?, é, 😀"


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_is_finite(reward: float) -> None:
    with pytest.raises(InvariantError, match="not finite"):
        trajectory(sampled([5], [-1.0], V3), reward=reward)


def test_a_reward_needs_a_sampled_token() -> None:
    with pytest.raises(InvariantError, match="no sampled token"):
        trajectory(given([1, 2]), sampled([], [], V3))


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"max_new_tokens": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": -2},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(InvariantError, match=next(iter(change))):
        dataclasses.replace(SAMPLING, **change)  # type: ignore[arg-type]


# ---- versions and names


def test_a_version_reads_back_from_its_text() -> None:
    assert WeightVersion.parse("2.17") == WeightVersion(2, 17)
    assert str(WeightVersion(2, 17)) == "2.17"
    assert WeightVersion(1, 9) < WeightVersion(1, 10) < WeightVersion(2, 0)


@pytest.mark.parametrize("text", ["", "3", "1.", ".1", "1.2.3", "-1.2", "1.x", "default"])
def test_any_other_text_is_no_version(text: str) -> None:
    with pytest.raises(InvariantError, match=r"lineage\.number"):
        WeightVersion.parse(text)


def test_a_version_has_no_negative_part() -> None:
    with pytest.raises(InvariantError, match="0 or more"):
        WeightVersion(0, -1)


def test_segments_are_equal_by_their_bytes() -> None:
    assert sampled([1], [math.nan], V3) == sampled([1], [math.nan], V3)
    assert sampled([1], [-0.0], V3) != sampled([1], [0.0], V3)
    assert sampled([1], [-1.0], V3) != sampled([1], [-1.0], V4)
    assert sampled([1], [-1.0], V3) != given([1])
    assert given([1]) != given([2])


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        V3.number = 4  # type: ignore[misc]


def test_a_members_name_is_the_same_on_every_attempt() -> None:
    assert trajectory_id("00000007", 3) == "00000007-003"


def test_an_empty_chain_has_empty_arrays() -> None:
    chain = Chain(())
    assert (len(chain.token_ids()), len(chain.mask()), len(chain.rollout_logprobs()), len(chain.version_numbers())) == (
        0,
    ) * 4
