"""Everything that crosses a process boundary, as frozen values.

Invariants, checked once in the constructors:
- a segment is either *given* (no version, no log-probs) or *sampled* by exactly one weight version (one log-prob a token);
- a trajectory ends with exactly one of a reward and a failure; a failure is never a reward;
- what is trained is derived from the segments, never stored beside them.

This module does not know how values are encoded (`laminar.codec`), stored, or made.
Shapes: T tokens. Units are in the names.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar.errors import InvariantError
from laminar.text import storable

FORMAT_VERSION = 2
"""Written into every encoded trajectory; a reader refuses what it does not know."""

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """One published set of weights. Number 0 is the initial weights; step n produces number n."""

    lineage: int
    number: int

    def __post_init__(self) -> None:
        if self.lineage < 0 or self.number < 0:
            raise InvariantError(f"weight version {self.lineage}.{self.number}: both parts must be 0 or more")

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "WeightVersion":
        """Read the text form `"lineage.number"`.

        Raises:
            InvariantError: if `text` is anything else.
        """
        lineage, dot, number = text.partition(".")
        if not (dot and lineage.isdecimal() and number.isdecimal()):
            raise InvariantError(f"weight version {text!r} is not of the form 'lineage.number'")
        return cls(int(lineage), int(number))


class Purpose(enum.StrEnum):
    """What a trajectory is for."""

    TRAIN = "train"
    GREEDY_BASELINE = "greedy_baseline"
    EVALUATION = "evaluation"


class FinishReason(enum.StrEnum):
    """Why a trajectory (or one turn of it) ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    WALL_TIME = "wall_time"


class FailureKind(enum.StrEnum):
    """Who is to blame when an episode yields no reward."""

    ENVIRONMENT = "environment"
    TOOL = "tool"
    VERIFIER = "verifier"
    ENGINE = "engine"
    TIMEOUT = "timeout"
    USER_BUG = "user_bug"


class EvictionReason(enum.StrEnum):
    """Why an admitted group left without being trained."""

    STALE = "stale"
    WAITED_TOO_LONG = "waited_too_long"
    ORPHANED = "orphaned"
    FULLY_MASKED = "fully_masked"
    PAYLOAD_LOST = "payload_lost"
    RECYCLED = "recycled"

    @property
    def is_for_age(self) -> bool:
        """Whether the staleness bound is the cause, directly or by a wait that it made too long."""
        return self in (EvictionReason.STALE, EvictionReason.WAITED_TOO_LONG, EvictionReason.FULLY_MASKED)


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 switch those filters off."""

    temperature: float
    max_new_tokens: int
    seed: int
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvariantError(f"temperature {self.temperature} must be finite and 0 or more")
        if self.max_new_tokens < 1:
            raise InvariantError(f"max_new_tokens {self.max_new_tokens} must be 1 or more")
        if not 0 < self.top_p <= 1:
            raise InvariantError(f"top_p {self.top_p} must lie in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            raise InvariantError(f"top_k {self.top_k} must be -1 (off) or 1 or more")


_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens from one source.

    Attributes:
        token_ids: (T,) int32.
        logprobs: (T,) float32, those the engine sampled with at the sampling temperature; None if given.
        version: the weights that sampled the tokens; None if given (prompt, tool output).
        masked_head_tokens: how many tokens at the start are kept out of the loss (after an in-place swap the first token's
            context was computed by two versions).
    """

    token_ids: Int32Array
    logprobs: Float32Array | None = None
    version: WeightVersion | None = None
    masked_head_tokens: int = 0

    def __post_init__(self) -> None:
        if self.token_ids.dtype != _INT32 or self.token_ids.ndim != 1:
            raise InvariantError(f"segment token_ids must be (T,) int32, not {self.token_ids.dtype} {self.token_ids.shape}")
        if (self.version is None) != (self.logprobs is None):
            raise InvariantError("a segment is sampled (version and log-probs) or given (neither)")
        if self.logprobs is not None and (self.logprobs.dtype != _FLOAT32 or self.logprobs.shape != self.token_ids.shape):
            raise InvariantError(
                f"sampled segment: {self.logprobs.shape} {self.logprobs.dtype} log-probs for {self.token_ids.shape} tokens; "
                "the engine must return one float32 log-prob for every token id"
            )
        if not 0 <= self.masked_head_tokens <= len(self.token_ids) or (self.masked_head_tokens and self.version is None):
            raise InvariantError(f"masked_head_tokens {self.masked_head_tokens} does not fit the segment")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        same_logprobs = (
            other.logprobs is None
            if self.logprobs is None
            else other.logprobs is not None and self.logprobs.tobytes() == other.logprobs.tobytes()
        )
        return (
            self.version == other.version
            and self.masked_head_tokens == other.masked_head_tokens
            and np.array_equal(self.token_ids, other.token_ids)
            and same_logprobs
        )

    @property
    def is_sampled(self) -> bool:
        """Whether the policy drew these tokens."""
        return self.version is not None


def given(token_ids: Any) -> Segment:
    """A segment of outside text: prompt, tool output, template glue."""
    return Segment(np.asarray(token_ids, dtype=np.int32))


def sampled(token_ids: Any, logprobs: Any, version: WeightVersion, masked_head_tokens: int = 0) -> Segment:
    """A segment drawn by one weight version."""
    return Segment(
        np.asarray(token_ids, dtype=np.int32), np.asarray(logprobs, dtype=np.float32), version, masked_head_tokens
    )


@dataclass(frozen=True, slots=True)
class Chain:
    """One training row: segments whose context is append-only. The arrays are derived and all of one length."""

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the row in tokens."""
        return sum(len(segment) for segment in self.segments)

    def token_ids(self) -> Int32Array:
        """(T,) int32."""
        return np.concatenate([s.token_ids for s in self.segments]) if self.segments else np.empty(0, np.int32)

    def mask(self) -> BoolArray:
        """(T,) bool: true where a token was sampled and is trained."""
        mask = np.zeros(self.num_tokens, np.bool_)
        start = 0
        for segment in self.segments:
            if segment.is_sampled:
                mask[start + segment.masked_head_tokens : start + len(segment)] = True
            start += len(segment)
        return mask

    def rollout_logprobs(self) -> Float32Array:
        """(T,) float32: as received from the engine; NaN at given tokens."""
        parts = [np.full(len(s), np.nan, np.float32) if s.logprobs is None else s.logprobs for s in self.segments]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def version_numbers(self) -> Int32Array:
        """(T,) int32: number of the sampling version; -1 at given tokens."""
        parts = [np.full(len(s), -1 if s.version is None else s.version.number, np.int32) for s in self.segments]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Turn:
    """Where one sampled turn lies in its chain: tokens [start, end), and why it ended."""

    chain: int
    start: int
    end: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode yielded no reward; `text` may quote a policy, so what cannot be stored of it becomes `?`."""

    kind: FailureKind
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", storable(self.text))


@dataclass(frozen=True, slots=True)
class Timings:
    """Where an episode's time went; `started_at` in Unix seconds, the rest in seconds.

    Attributes:
        phases: the first ones, for drawing: what went on, and from when to when, in seconds since the start. They stay with
            who played the episode.
    """

    started_at: float = 0.0
    generate_seconds: float = 0.0
    environment_seconds: float = 0.0
    reward_seconds: float = 0.0
    total_seconds: float = 0.0
    phases: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at a prompt, from first token to reward.

    `counts` says how often something noteworthy happened in it, by name (`malformed_calls`, `drifted_turns`);
    zeros are left out.
    """

    trajectory_id: str
    group_id: str
    prompt_id: str
    member: int
    attempt: int
    purpose: Purpose
    sampling: SamplingParameters
    chains: tuple[Chain, ...]
    finish_reason: FinishReason | None
    reward: float | None
    reward_terms: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    turns: tuple[Turn, ...] = ()
    timings: Timings = Timings()
    worker: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.failure is None):
            raise InvariantError(f"trajectory {self.trajectory_id}: needs exactly one of a reward and a failure")
        if self.reward is not None and not math.isfinite(self.reward):
            raise InvariantError(f"trajectory {self.trajectory_id}: reward {self.reward} is not finite")
        if self.reward is not None and not self._is_sampled():
            raise InvariantError(f"trajectory {self.trajectory_id}: has a reward but no sampled token")

    def _is_sampled(self) -> bool:
        for chain in self.chains:
            for segment in chain.segments:
                if segment.version is not None and len(segment.token_ids):
                    return True
        return False

    def versions(self) -> list[WeightVersion]:
        """The versions of the sampled segments, in order."""
        return [s.version for chain in self.chains for s in chain.segments if s.version is not None and len(s)]

    @property
    def oldest(self) -> WeightVersion | None:
        """The oldest version that sampled a token, by number; None if nothing was sampled."""
        return min(self.versions(), key=lambda v: v.number, default=None)

    @property
    def newest(self) -> WeightVersion | None:
        """The newest version that sampled a token, by number; None if nothing was sampled."""
        return max(self.versions(), key=lambda v: v.number, default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens of all chains, given and sampled."""
        return sum(chain.num_tokens for chain in self.chains)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy drew."""
        return sum(len(s) for chain in self.chains for s in chain.segments if s.is_sampled)

    @property
    def is_truncated(self) -> bool:
        """Whether a length limit, not the policy, ended it: by the engine's stop reason, never by the last token id."""
        return self.finish_reason in (FinishReason.LENGTH, FinishReason.MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task: raw text or chat messages, and the data row's other fields (such as `answer`) for the reward."""

    prompt_id: str
    content: str | tuple[Message, ...]
    fields: dict[str, Any] = field(default_factory=dict)


class GroupState(enum.StrEnum):
    """Where an outstanding group stands."""

    IN_FLIGHT = "in_flight"
    READY = "ready"
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class GroupHeader:
    """What the sampler sees of an outstanding group.

    Attributes:
        group_id: name of the group.
        admission: index in the order of admission, from 0.
        state: where it stands.
        oldest: number of its oldest sampled token; the claiming engine's number until a token is known.
        newest: number of its newest known token.
        max_staleness: the bound it was admitted under; None if unbounded.
        num_bytes: payload size so far.
        owner: the worker that plays it, for naming it in waits.
    """

    group_id: str
    admission: int
    state: GroupState
    oldest: int
    newest: int
    max_staleness: int | None
    num_bytes: int = 0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ClaimedGroup:
    """A group that a worker may play: which members are missing, on which attempt, and under how manieth claim.

    A claim above 1 means that an earlier owner may have left something (`laminar.experience.partial`).
    """

    group_id: str
    admission: int
    prompt: Prompt
    members: tuple[int, ...]
    attempt: int
    claim: int = 1


def trajectory_id(group_id: str, member: int) -> str:
    """Name of a group's member; the same on every attempt."""
    return f"{group_id}-{member:03d}"
