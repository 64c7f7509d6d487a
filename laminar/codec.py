"""Trajectories and prompts as bytes: one frame each.

Frame: a header of 16 bytes, little-endian, whose layout never changes (magic, kind, format version, checksum), then
msgpack. The checksum (xxh3, 64 bits) covers kind, version and body, so a damaged frame is told from a foreign version.
A trajectory's body holds its plain fields in the order of `laminar.types.Trajectory`, one row of four numbers a segment,
and all token ids (int32) and all log-probs (float32) as two runs of little-endian bytes: a change of `Trajectory` needs a
new `FORMAT_VERSION`. This module does not know where frames are kept.
"""

import dataclasses
import operator
import struct
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from laminar.errors import ConfigError, ExperienceError
from laminar.types import FORMAT_VERSION, Chain, Float32Array, Int32Array, Prompt, Segment, Trajectory, WeightVersion

Value = TypeVar("Value")

_HEADER = struct.Struct("<4sHHQ")
_MAGIC = b"LMNR"
_TRAJECTORY = 1
_PROMPT = 2
_NAMES = {_TRAJECTORY: "trajectory", _PROMPT: "prompt"}

_RUN_HEADER = struct.Struct(">BI")
_RUN_MARK = 0xC6
"""Of msgpack's binary values with a length of 32 bits."""
_NOTHING = memoryview(b"")
_EMPTY_RUN = b"\xc4\x00"
"""msgpack's shortest binary value, an empty one."""

_GIVEN = -1
"""Stands for the lineage and the number of a given segment."""

_CHAINS_AT = [field.name for field in dataclasses.fields(Trajectory)].index("chains")
_PLAIN_FIELDS = {field.name: field.type for field in dataclasses.fields(Trajectory) if field.name != "chains"}
_TrajectoryBody = msgspec.defstruct(
    "_TrajectoryBody",
    [
        *_PLAIN_FIELDS.items(),
        ("chains", list[list[tuple[int, int, int, int]]]),  # a segment: tokens, lineage, number, masked head tokens
        ("token_ids", memoryview),
        ("logprobs", memoryview),
    ],
    array_like=True,
)
_plain_values = operator.attrgetter(*_PLAIN_FIELDS)
_ENCODER = msgspec.msgpack.Encoder()
_TRAJECTORY_DECODER = msgspec.msgpack.Decoder(_TrajectoryBody)
_PROMPT_DECODER = msgspec.msgpack.Decoder(Prompt)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """One frame, marked with the trajectory's format version. The arrays are copied once, into it."""
    segments = [segment for chain in trajectory.chains for segment in chain.segments]
    body = _TrajectoryBody(
        *_plain_values(trajectory),
        chains=[[_segment_row(segment) for segment in chain.segments] for chain in trajectory.chains],
        token_ids=_NOTHING,
        logprobs=_NOTHING,
    )
    plain = _ENCODER.encode(body).removesuffix(2 * _EMPTY_RUN)
    token_ids = [segment.token_ids for segment in segments]
    logprobs = [segment.logprobs for segment in segments if segment.logprobs is not None]
    return _seal(
        _TRAJECTORY,
        trajectory.format_version,
        plain,
        _RUN_HEADER.pack(_RUN_MARK, sum([array.nbytes for array in token_ids])),
        *map(_bytes, token_ids),
        _RUN_HEADER.pack(_RUN_MARK, sum([array.nbytes for array in logprobs])),
        *map(_bytes, logprobs),
    )


def decode_trajectory(frame: bytes) -> Trajectory:
    """The trajectory of a frame; its arrays are read-only views on the frame.

    Raises:
        ExperienceError: if the frame is cut, damaged, or holds something else.
        ConfigError: if it was written in another format version.
    """
    body: Any = _unseal(_TRAJECTORY_DECODER, _TRAJECTORY, frame)
    values = list(_plain_values(body))
    values.insert(_CHAINS_AT, _chains(body))
    return Trajectory(*values)


def encode_prompt(prompt: Prompt) -> bytes:
    """One frame. The fields may hold what JSON holds; a tuple comes back as a list.

    Raises:
        ConfigError: if a field holds something that cannot be stored.
    """
    try:
        return _seal(_PROMPT, FORMAT_VERSION, _ENCODER.encode(prompt))
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"prompt {prompt.prompt_id!r}: a field cannot be stored ({error}); use text, numbers, booleans, lists and tables"
        ) from error


def decode_prompt(frame: bytes) -> Prompt:
    """The prompt of a frame.

    Raises:
        ExperienceError: if the frame is cut, damaged, or holds something else.
        ConfigError: if it was written in another format version.
    """
    return _unseal(_PROMPT_DECODER, _PROMPT, frame)


def _bytes(array: Int32Array | Float32Array) -> memoryview | bytes:
    """The array's bytes, without a copy if they lie together."""
    return array.data if array.flags.c_contiguous else array.tobytes()


def _segment_row(segment: Segment) -> tuple[int, int, int, int]:
    if segment.version is None:
        return len(segment), _GIVEN, _GIVEN, 0
    return len(segment), segment.version.lineage, segment.version.number, segment.masked_head_tokens


def _chains(body: Any) -> tuple[Chain, ...]:
    token_ids = np.frombuffer(body.token_ids, "<i4")
    logprobs = np.frombuffer(body.logprobs, "<f4")
    versions: dict[tuple[int, int], WeightVersion] = {}
    chains, token, logprob = [], 0, 0
    for rows in body.chains:
        segments = []
        for num_tokens, lineage, number, masked_head_tokens in rows:
            ids = token_ids[token : token + num_tokens]
            token += num_tokens
            if lineage == _GIVEN:
                segments.append(Segment(ids))
                continue
            version = versions.get((lineage, number)) or versions.setdefault(
                (lineage, number), WeightVersion(lineage, number)
            )
            segments.append(Segment(ids, logprobs[logprob : logprob + num_tokens], version, masked_head_tokens))
            logprob += num_tokens
        chains.append(Chain(tuple(segments)))
    return tuple(chains)


def _checksum(kind: int, version: int, body: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=kind << 16 | version)


def _seal(kind: int, version: int, *parts: bytes | memoryview) -> bytes:
    body = b"".join(parts)
    return _HEADER.pack(_MAGIC, kind, version, _checksum(kind, version, body)) + body


def _unseal(decoder: "msgspec.msgpack.Decoder[Value]", kind: int, frame: bytes) -> Value:
    name = _NAMES[kind]
    if len(frame) < _HEADER.size or not frame.startswith(_MAGIC):
        raise ExperienceError(f"these {len(frame)} bytes are no {name} frame; something else wrote under its key")
    _, found_kind, version, checksum = _HEADER.unpack_from(frame)
    body = memoryview(frame)[_HEADER.size :]
    if _checksum(found_kind, version, body) != checksum:
        raise ExperienceError(f"a {name} frame of {len(frame)} bytes is cut or damaged: its checksum does not match")
    if found_kind != kind:
        raise ExperienceError(f"expected a {name} frame and found {_NAMES.get(found_kind, f'kind {found_kind}')}")
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"a {name} frame has format version {version}, but this laminar-rl reads version {FORMAT_VERSION}; "
            "use the laminar-rl that started the run, or start a new run"
        )
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ExperienceError(f"a {name} frame of {len(frame)} bytes cannot be read: {error}") from error
