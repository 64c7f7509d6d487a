"""What an engine gives back for one request, as a frozen value.

Invariant: the segments are sampled ones, in order, split where the version changes (or where an engine swapped in place).
This module knows neither how an engine is reached nor what an episode does with the tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from laminar.errors import InvariantError
from laminar.types import FinishReason, Int32Array, SamplingParameters, Segment


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampled continuation of one request.

    Attributes:
        segments: sampled segments by version, in order; empty if nothing was drawn (an abort while queued).
        finish_reason: `STOP`, `LENGTH`, or `ABORT` (the partial answer is kept and may be resumed).
        cached_tokens: prompt tokens whose keys and values the engine had already.
    """

    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if any(not segment.is_sampled for segment in self.segments):
            raise InvariantError("a generation holds sampled segments only")

    @property
    def num_tokens(self) -> int:
        """Tokens drawn."""
        return sum(len(segment) for segment in self.segments)

    def token_ids(self) -> Int32Array:
        """(T,) int32: all drawn tokens."""
        return np.concatenate([s.token_ids for s in self.segments]) if self.segments else np.empty(0, np.int32)


OnSegment = Callable[[Segment], None]
"""Hears of every new part of an answer while it is sampled."""


class Generator(Protocol):
    """The part of an engine that an episode needs."""

    async def generate(
        self, input_ids: Int32Array, sampling: SamplingParameters, request_id: str, on_segment: OnSegment | None = None, /
    ) -> Generation:
        """Continue `input_ids` (T,) int32. Cancelling the call must abort the request at the engine.

        `request_id` is new for every call and has 32 characters. An engine that dies on the way may answer with what had
        come, as aborted, if `on_segment` was given.

        Raises:
            EngineError: the engine answered wrongly, or not at all.
            DeadlineError: the engine did not answer in time.
        """
        ...
