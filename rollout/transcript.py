"""The token record of one episode while it is played: append-only chains, of which the last is open, and their turns.

Invariants: ids, log-probs and versions grow together, segment by segment (case D12); nothing already there is changed, but a
turn's end is cut off behind its stop text. Pure: no I/O, no clock.
"""

import copy
from collections.abc import Callable, Sequence

import numpy as np

from laminar.types import Chain, FinishReason, Int32Array, Segment, Turn, given

Decode = Callable[[Int32Array], str]


class Transcript:
    """Segments so far, and where the turns lie in them."""

    def __init__(self) -> None:
        self._closed: list[Chain] = []
        self._segments: list[Segment] = []
        self._turns: list[Turn] = []
        self._turn_segment = 0
        self._turn_start = 0

    def copy(self) -> "Transcript":
        """One that goes on by itself."""
        other = copy.copy(self)
        other._closed, other._segments, other._turns = list(self._closed), list(self._segments), list(self._turns)
        return other

    @property
    def num_tokens(self) -> int:
        """Tokens so far, given and sampled, of all chains."""
        return sum(chain.num_tokens for chain in self._closed) + self._open_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy drew so far, in all chains."""
        segments = [segment for chain in self._closed for segment in chain.segments] + self._segments
        return sum(len(segment) for segment in segments if segment.is_sampled)

    @property
    def _open_tokens(self) -> int:
        return sum(len(segment) for segment in self._segments)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that have ended."""
        return tuple(self._turns)

    def token_ids(self) -> Int32Array:
        """(T,) int32: the open chain, as the next request must carry it."""
        return Chain(tuple(self._segments)).token_ids()

    def turn_token_ids(self) -> Int32Array:
        """(T,) int32: what the open turn has sampled so far."""
        return Chain(tuple(self._segments[self._turn_segment :])).token_ids()

    def turn_segments(self) -> tuple[Segment, ...]:
        """The segments that the open turn has sampled so far."""
        return tuple(self._segments[self._turn_segment :])

    def chains(self) -> tuple[Chain, ...]:
        """The record as a trajectory stores it; empty if nothing was ever said."""
        return (*self._closed, Chain(tuple(self._segments))) if self._segments else tuple(self._closed)

    def begin_chain(self) -> None:
        """Close the open chain: what follows has another context."""
        if self._segments:
            self._closed.append(Chain(tuple(self._segments)))
            self._segments = []

    def add_given(self, token_ids: Int32Array) -> None:
        """Append outside text, and open the next turn behind it."""
        if len(token_ids):
            self._segments.append(given(token_ids))
        self._turn_segment = len(self._segments)
        self._turn_start = self._open_tokens

    def add_sampled(self, segments: Sequence[Segment]) -> None:
        """Append one part of the open turn; a part that drew nothing adds nothing."""
        self._segments.extend(segment for segment in segments if len(segment))

    def cut_at_stop(self, stop: Sequence[str], decode: Decode) -> bool:
        """Drop the open turn's tokens behind the first one that completes a stop text; whether there was one."""
        token_ids = self.turn_token_ids()
        keep = first_stop(token_ids, stop, decode)
        if keep is None:
            return False
        excess = len(token_ids) - keep
        while excess:
            last = self._segments.pop()
            if len(last) > excess:
                self._segments.append(_head(last, len(last) - excess))
            excess -= min(excess, len(last))
        return True

    def end_turn(self, reason: FinishReason) -> None:
        """Note where the open turn ended, and why."""
        self._turns.append(Turn(len(self._closed), self._turn_start, self._open_tokens, reason))


def first_stop(token_ids: Int32Array, stop: Sequence[str], decode: Decode) -> int | None:
    """How many tokens it takes until the decoded text holds one of the stop texts; None if it never does.

    Bisection, since a text that holds a stop text still holds it with more tokens behind.
    """

    def stopped(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(text_end in text for text_end in stop)

    if not stop or not stopped(len(token_ids)):
        return None
    low, high = 0, len(token_ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle, high)
    return high


def _head(segment: Segment, count: int) -> Segment:
    return Segment(
        np.ascontiguousarray(segment.token_ids[:count]),
        None if segment.logprobs is None else np.ascontiguousarray(segment.logprobs[:count]),
        segment.version,
        min(segment.masked_head_tokens, count),
    )
