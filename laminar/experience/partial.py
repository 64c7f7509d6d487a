"""The partial pool: what running trajectories have sampled so far, so that a new owner goes on where the last one died.

Invariants: tokens, log-probs and versions are appended together, in order, once (known by attempt and offset); only the
holder of a group's newest claim may append or adopt, so a partial has one owner at any time; the tokens of one member never
take more than the bytes reserved for its payload. Gone with the member's submit, and with its group.

It is a saving, not a promise: a server short of memory takes no appends, and what was not appended is sampled again.
This module does not know engines or environments.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial as bound
from typing import Any

import msgspec
import numpy as np
import redis

from laminar.errors import ExperienceError
from laminar.experience.store import ExperienceStore, new_request_id, unpack
from laminar.types import FinishReason, Segment, WeightVersion


class AppendOutcome(enum.StrEnum):
    """What became of an append; `LOST` and `FULL` are final for this attempt."""

    APPENDED = "appended"
    LOST = "lost"
    FULL = "full"
    NO_MEMORY = "no_memory"


@dataclass(frozen=True, slots=True)
class PartialTurn:
    """Sampled tokens of one turn, as far as they are known.

    Attributes:
        turn: which turn of the trajectory, from 0.
        context: checksum of all token ids before the turn; a new owner that is led to another context starts afresh.
        segments: sampled ones.
        finish_reason: why the turn ended; None if it had not.
    """

    turn: int
    context: int
    segments: tuple[Segment, ...]
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        return sum(len(segment) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Partial:
    """What was left of one trajectory: its attempt, on which its seed hangs, and its turns, the last one perhaps open."""

    attempt: int
    turns: tuple[PartialTurn, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens sampled."""
        return sum(turn.num_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class PartialPiece:
    """One append.

    Attributes:
        group_id, member, attempt: whose tokens these are.
        claim: the claim under which they were sampled.
        offset: sampled tokens of this attempt before them.
        turns: at least one token; the first may go on with a turn that an earlier piece began.
    """

    group_id: str
    member: int
    attempt: int
    claim: int
    offset: int
    turns: tuple[PartialTurn, ...]


class _Row(msgspec.Struct, array_like=True):
    """A segment, or an empty one that carries a turn's end."""

    turn: int
    context: int
    lineage: int
    number: int
    masked_head_tokens: int
    token_ids: bytes
    logprobs: bytes
    finish_reason: FinishReason | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Row])


class PartialPool:
    """Tokens of running trajectories.

    Args:
        store: the run's data.
    """

    def __init__(self, store: ExperienceStore) -> None:
        self._store = store

    async def append(self, pieces: Sequence[PartialPiece]) -> list[AppendOutcome]:
        """Append in one pipeline. May be repeated.

        Raises:
            ExperienceError: the server is away.
        """
        requests = [(_arguments(piece), _encode(piece.turns)) for piece in pieces]
        return await self._store.insist("append_partial", bound(self._send, requests))

    async def adopt(self, group_id: str, claim: int) -> dict[int, Partial]:
        """What earlier owners have left of a claimed group's missing members, by member. May be repeated.

        The claim itself made the caller the owner: what another appends from then on is refused. Empty, too, if the group
        is not held under this claim any more; the next heartbeat says so.
        """
        found = await self._store.run("adopt", group=group_id, claim=claim)
        return {member: Partial(attempt, _decode(chunks)) for member, attempt, chunks in found}

    async def _send(self, requests: list[tuple[dict[str, Any], bytes]]) -> list[AppendOutcome]:
        answers = await self._pipeline(requests)
        if any(isinstance(answer, redis.exceptions.NoScriptError) for answer in answers):
            await self._store.load("append_partial")
            answers = await self._pipeline(requests)
        return [_outcome(answer) for answer in answers]

    async def _pipeline(self, requests: list[tuple[dict[str, Any], bytes]]) -> list[Any]:
        async with self._store.client.pipeline(transaction=False) as pipeline:
            for arguments, chunk in requests:
                pipeline.execute_command(*self._store.command("append_partial", new_request_id(), arguments, chunk))
            return await pipeline.execute(raise_on_error=False)


def _arguments(piece: PartialPiece) -> dict[str, Any]:
    segments = [segment for turn in piece.turns for segment in turn.segments]
    numbers = [segment.version.number for segment in segments if segment.version is not None]
    if len(numbers) != len(segments) or not numbers:
        raise ExperienceError(f"a piece of {piece.group_id} member {piece.member} must hold sampled tokens, and only such")
    return {
        "group": piece.group_id,
        "member": piece.member,
        "claim": piece.claim,
        "attempt": piece.attempt,
        "offset": piece.offset,
        "count": sum(map(len, segments)),
        "oldest": min(numbers),
        "newest": max(numbers),
    }


def _encode(turns: Iterable[PartialTurn]) -> bytes:
    rows = []
    for turn in turns:
        for segment in turn.segments:
            assert segment.version is not None
            assert segment.logprobs is not None
            version, ids, logprobs = segment.version, segment.token_ids.tobytes(), segment.logprobs.tobytes()
            masked = segment.masked_head_tokens
            rows.append(_Row(turn.turn, turn.context, version.lineage, version.number, masked, ids, logprobs, None))
        if turn.finish_reason is not None:
            rows.append(_Row(turn.turn, turn.context, 0, 0, 0, b"", b"", turn.finish_reason))
    return _encoder.encode(rows)


def _decode(chunks: Iterable[bytes]) -> tuple[PartialTurn, ...]:
    return joined_turns(_turn(row) for chunk in chunks for row in _decoder.decode(chunk))


def _turn(row: _Row) -> PartialTurn:
    if not row.token_ids:
        return PartialTurn(row.turn, row.context, (), row.finish_reason)
    ids, logprobs = np.frombuffer(row.token_ids, "<i4"), np.frombuffer(row.logprobs, "<f4")
    segment = Segment(ids, logprobs, WeightVersion(row.lineage, row.number), row.masked_head_tokens)
    return PartialTurn(row.turn, row.context, (segment,))


def joined_turns(parts: Iterable[PartialTurn]) -> tuple[PartialTurn, ...]:
    """Parts of turns, in order, as one value a turn."""
    turns: dict[int, list[PartialTurn]] = {}
    for part in parts:
        turns.setdefault(part.turn, []).append(part)
    return tuple(
        PartialTurn(turn, pieces[0].context, _joined([s for p in pieces for s in p.segments]), pieces[-1].finish_reason)
        for turn, pieces in turns.items()
    )


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Sampled segments with neighbours of one version made one, unless the later one begins masked."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and runs[-1][-1].version == segment.version and not segment.masked_head_tokens:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return tuple(run[0] if len(run) == 1 else _concatenated(run) for run in runs)


def _concatenated(run: list[Segment]) -> Segment:
    ids = np.concatenate([segment.token_ids for segment in run])
    logprobs = np.concatenate([segment.logprobs for segment in run if segment.logprobs is not None])
    return Segment(ids, logprobs, run[0].version, run[0].masked_head_tokens)


def _outcome(answer: Any) -> AppendOutcome:
    if isinstance(answer, redis.exceptions.OutOfMemoryError):
        return AppendOutcome.NO_MEMORY
    if isinstance(answer, Exception):
        raise answer
    return AppendOutcome(unpack(answer))
