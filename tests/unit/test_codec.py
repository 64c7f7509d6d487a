"""Frames: what goes in comes out, bit by bit; what is damaged or foreign is refused with a sentence."""

import dataclasses
import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given as with_values
from hypothesis import settings
from hypothesis import strategies as st

from laminar.codec import decode_prompt, decode_trajectory, encode_prompt, encode_trajectory
from laminar.errors import ConfigError, ExperienceError
from laminar.types import (
    FORMAT_VERSION,
    Chain,
    Failure,
    FailureKind,
    FinishReason,
    Message,
    Prompt,
    Purpose,
    SamplingParameters,
    Segment,
    Timings,
    Trajectory,
    Turn,
    WeightVersion,
    given,
    sampled,
)

FULL = Trajectory(
    trajectory_id="00000003-001",
    group_id="00000003",
    prompt_id="row-ü",
    member=1,
    attempt=2,
    purpose=Purpose.GREEDY_BASELINE,
    sampling=SamplingParameters(0.7, 100, 2**63 - 1, 0.9, 40, (20, 21), ("\n", "end")),
    chains=(
        Chain(
            (given([1, 2]), sampled([3], [-0.1], WeightVersion(0, 3)), sampled([4, 5], [-0.2, 0.0], WeightVersion(1, 4), 1))
        ),
        Chain((given([]), sampled([], [], WeightVersion(1, 6)), sampled([2**31 - 1], [-87.5], WeightVersion(1, 6)))),
        Chain(()),
    ),
    finish_reason=FinishReason.MAX_TURNS,
    reward=-0.1,
    reward_terms={"format": 0.1, "answer": -0.2},
    turns=(Turn(0, 2, 3, FinishReason.STOP), Turn(1, 0, 1, FinishReason.LENGTH)),
    timings=Timings(1.7e9, 1.5, 0.25, 0.125, 2.0),
    worker="worker-1",
)
FAILED = dataclasses.replace(
    FULL, reward=None, chains=(), turns=(), finish_reason=None, failure=Failure(FailureKind.TOOL, "no such file")
)
PROMPT = Prompt("p1", (Message("system", "Be brief."), Message("user", "3 + 4 =")), {"answer": "7", "row": [1, {"x": None}]})


@pytest.mark.parametrize("trajectory", [FULL, FAILED])
def test_a_trajectory_comes_back_whole(trajectory: Trajectory) -> None:
    assert decode_trajectory(encode_trajectory(trajectory)) == trajectory


def test_a_failure_that_quotes_half_of_a_character_is_stored() -> None:
    trajectory = dataclasses.replace(FAILED, failure=Failure(FailureKind.TOOL, "cannot open a\ud83d"))
    assert decode_trajectory(encode_trajectory(trajectory)) == trajectory


def test_log_probs_keep_their_bits() -> None:
    logprobs = np.asarray([-0.0, math.nan, -math.inf, 1e-45, -1.1], np.float32)
    trajectory = dataclasses.replace(FULL, chains=(Chain((sampled([1, 2, 3, 4, 5], logprobs, WeightVersion(0, 0)),)),))
    segment = decode_trajectory(encode_trajectory(trajectory)).chains[0].segments[0]
    assert segment.logprobs is not None
    assert segment.logprobs.tobytes() == logprobs.tobytes()


def test_arrays_that_are_views_of_larger_ones_are_encoded_as_they_read() -> None:
    ids, logprobs = np.arange(10, dtype=np.int32), np.arange(10, dtype=np.float32)
    segment = Segment(ids[::2], logprobs[::-2], WeightVersion(0, 0))
    decoded = decode_trajectory(encode_trajectory(dataclasses.replace(FULL, chains=(Chain((segment,)),))))
    assert decoded.chains[0].segments[0].token_ids.tolist() == [0, 2, 4, 6, 8]
    assert decoded.chains[0].rollout_logprobs().tolist() == [9.0, 7.0, 5.0, 3.0, 1.0]


def test_derived_arrays_of_a_decoded_trajectory_can_be_written() -> None:
    """The segments are views on the frame; what the trainer works on is its own."""
    chain = decode_trajectory(encode_trajectory(FULL)).chains[0]
    for array in (chain.token_ids(), chain.rollout_logprobs(), chain.mask(), chain.version_numbers()):
        assert array.flags.writeable


def test_a_frame_costs_little_more_than_its_arrays() -> None:
    """32,768 sampled tokens at 4 + 4 bytes; the rest stays under 600 bytes."""
    num_tokens = 32_768
    segment = sampled(np.arange(num_tokens), np.zeros(num_tokens), WeightVersion(0, 1))
    trajectory = dataclasses.replace(FULL, chains=(Chain((segment,)),))
    assert num_tokens * 8 < len(encode_trajectory(trajectory)) < num_tokens * 8 + 600


def test_ids_and_log_probs_lie_in_the_frame_as_little_endian_bytes() -> None:
    frame = encode_trajectory(FULL)
    assert struct.pack("<6i", 1, 2, 3, 4, 5, 2**31 - 1) in frame
    assert struct.pack("<4f", -0.1, -0.2, 0.0, -87.5) in frame


segments = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).flatmap(
    lambda ids: st.one_of(
        st.just(given(ids)),
        st.builds(
            lambda logprobs, lineage, number: sampled(ids, logprobs, WeightVersion(lineage, number)),
            st.lists(st.floats(width=32), min_size=len(ids), max_size=len(ids)),
            st.integers(0, 3),
            st.integers(0, 2**40),
        ),
    )
)


@settings(max_examples=60, deadline=None, derandomize=True)
@with_values(chains=st.lists(st.lists(segments, max_size=4), max_size=3))
def test_any_segments_come_back(chains: list[list[Segment]]) -> None:
    trajectory = dataclasses.replace(FAILED, chains=tuple(Chain(tuple(chain)) for chain in chains))
    assert decode_trajectory(encode_trajectory(trajectory)) == trajectory


# ---- prompts


@pytest.mark.parametrize("prompt", [PROMPT, Prompt("p2", "3 + 4 =\n"), Prompt("", "", {})])
def test_a_prompt_comes_back_whole(prompt: Prompt) -> None:
    assert decode_prompt(encode_prompt(prompt)) == prompt


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@with_values(fields=st.dictionaries(st.text(max_size=5), json_like, max_size=4))
def test_a_prompt_keeps_any_json_like_fields(fields: dict[str, Any]) -> None:
    prompt = Prompt("p", "text", fields)
    assert decode_prompt(encode_prompt(prompt)) == prompt


@pytest.mark.parametrize("value", [object(), np.zeros(3), 2**64, 1j, "\ud83d"])
def test_a_field_that_cannot_be_stored_names_its_prompt(value: object) -> None:
    with pytest.raises(ConfigError, match="prompt 'row-7': a field cannot be stored"):
        encode_prompt(Prompt("row-7", "text", {"x": value}))


# ---- refused


def test_every_cut_frame_is_refused() -> None:
    frame = encode_trajectory(FULL)
    for length in range(len(frame)):
        with pytest.raises(ExperienceError, match=f"{length} bytes"):
            decode_trajectory(frame[:length])


def test_every_flipped_bit_is_noticed() -> None:
    frame = encode_prompt(PROMPT)
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ExperienceError):
            decode_prompt(bytes(damaged))


@pytest.mark.parametrize("frame", [b"", b"x", b"\x80" * 100, b"LMNR"])
def test_other_bytes_are_refused(frame: bytes) -> None:
    with pytest.raises(ExperienceError, match=f"{len(frame)} bytes are no trajectory frame"):
        decode_trajectory(frame)


def test_a_prompt_is_not_read_as_a_trajectory() -> None:
    with pytest.raises(ExperienceError, match="expected a trajectory frame and found prompt"):
        decode_trajectory(encode_prompt(PROMPT))
    with pytest.raises(ExperienceError, match="expected a prompt frame and found trajectory"):
        decode_prompt(encode_trajectory(FULL))


def test_another_format_version_is_refused_with_both_numbers() -> None:
    frame = encode_trajectory(dataclasses.replace(FULL, format_version=FORMAT_VERSION + 6))
    with pytest.raises(ConfigError, match=f"format version {FORMAT_VERSION + 6}.* reads version {FORMAT_VERSION}"):
        decode_trajectory(frame)


def test_a_sound_frame_of_another_shape_is_refused() -> None:
    """The frame is made by hand: magic, kind 2 (prompt), format version, checksum seeded with both, body."""
    body = msgspec.msgpack.encode({"prompt_id": 7})
    checksum = xxhash.xxh3_64(body, seed=2 << 16 | FORMAT_VERSION).intdigest()
    with pytest.raises(ExperienceError, match="a prompt frame of 28 bytes cannot be read"):
        decode_prompt(struct.pack("<4sHHQ", b"LMNR", 2, FORMAT_VERSION, checksum) + body)
