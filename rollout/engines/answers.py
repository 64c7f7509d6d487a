"""Answers of the engines' protocol: a stream's parts become one answer, an answer becomes a checked generation.

Invariants: ids and log-probs that do not match in number are an error, never padded; whatever an engine answers becomes a
generation or an `EngineError`; after an in-place swap the first token of the later version is marked as masked, in the parts
of a stream as in a whole answer. Pure: no I/O. This module does not know how answers travel.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from laminar.errors import EngineError, InvariantError
from laminar.types import FinishReason, Segment, WeightVersion, sampled
from rollout.generation import Generation, OnSegment

_MALFORMED = (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, InvariantError)
"""What reading an answer raises that does not keep to the protocol."""
_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
_ROUNDING = 1e-3
"""How far above 0 rounding may take the log-prob of a token that is nearly certain."""


@contextlib.contextmanager
def protocol_kept(answer: Any) -> Iterator[None]:
    """Reading an answer: whatever a malformed one makes go wrong becomes an `EngineError` that shows it."""
    try:
        yield
    except _MALFORMED as error:
        raise EngineError(
            f"the engine's answer {answer!r:.200} is malformed ({type(error).__name__}: {error}); "
            "it must keep to the protocol in rollout/engines/README.md"
        ) from error


class AnswerStream:
    """A streamed answer as it grows, whether its parts are increments or repeat what came before.

    Args:
        on_segment: hears of every batch of new tokens, once for each version among them.
        masked_heads, sent_under: as of `read_answer`.
    """

    def __init__(self, on_segment: OnSegment, *, masked_heads: bool, sent_under: WeightVersion | None = None) -> None:
        self.ids: list[int] = []
        self._triples: list[Any] = []
        self._meta: dict[str, Any] = {}
        self._on_segment = on_segment
        self._masked_heads, self._sent_under = masked_heads, sent_under
        self._last = sent_under

    @property
    def is_complete(self) -> bool:
        """Whether the last part has come."""
        return bool(self._meta.get("finish_reason"))

    def add(self, answer: Any) -> None:
        """Take one part, and pass on its new tokens.

        Raises:
            EngineError: it is malformed.
        """
        with protocol_kept(answer):
            segments = self._take(answer)
        for segment in segments:
            self._on_segment(segment)

    def _take(self, answer: Any) -> list[Segment]:
        known, meta = len(self.ids), answer["meta_info"]
        start = meta.get("completion_tokens", known) - len(answer["output_ids"])
        self.ids[start:] = answer["output_ids"]
        self._triples[start:] = meta.get("output_token_logprobs") or []
        self._meta = meta
        segments = []
        if len(self.ids) == len(self._triples):
            for span in _spans_of(meta, len(self.ids)):
                new = slice(max(span["start"], known), span["end"])
                if ids := self.ids[new]:
                    version = WeightVersion.parse(span["version"])
                    masked = self._masked_heads and self._last not in (None, version)
                    segments.append(_segment(ids, self._triples[new], version, masked))
                    self._last = version
        return segments

    def whole(self) -> Generation:
        """The answer as if it had not been streamed. Raises as `read_answer`."""
        answer = {"output_ids": self.ids, "meta_info": self._meta | {"output_token_logprobs": self._triples}}
        return read_answer(answer, masked_heads=self._masked_heads, sent_under=self._sent_under)

    def broken_off(self) -> Generation:
        """What has come, as an aborted answer. Raises as `read_answer`."""
        self._meta["finish_reason"] = {"type": "abort", "message": "the stream broke off"}
        return self.whole()


def read_answer(answer: Any, *, masked_heads: bool, sent_under: WeightVersion | None = None) -> Generation:
    """The generation in an answer of the protocol.

    Args:
        answer: `output_ids` and `meta_info`.
        masked_heads: whether the first token of every later version is kept out of the loss (in-place swaps).
        sent_under: the version when the request was sent; with another one, even the first token is a later version's.

    Raises:
        EngineError: it is malformed, or its counts or spans do not fit.
    """
    with protocol_kept(answer):
        return _read(answer, masked_heads, sent_under)


def read_scores(answer: Any, num_tokens: int) -> tuple[WeightVersion, list[float]]:
    """The version and the log-probs of given tokens, of all but the first, in an answer of the protocol.

    Raises:
        EngineError: it is malformed, or they are not as many as there are tokens.
    """
    with protocol_kept(answer):
        meta = answer["meta_info"]
        scored = [triple[0] for triple in meta.get("input_token_logprobs") or []][1:]
        if len(scored) != num_tokens - 1 or not all(isinstance(value, float) for value in scored):
            raise EngineError(f"{num_tokens} tokens to score, {len(scored)} log-probs or not all of them numbers")
        return WeightVersion.parse(_spans_of(meta, 1)[0]["version"]), scored


def _read(answer: Any, masked_heads: bool, sent_under: WeightVersion | None) -> Generation:
    meta = answer["meta_info"]
    ids = answer["output_ids"]
    triples = meta.get("output_token_logprobs") or []
    expected = meta.get("completion_tokens", len(ids))
    if not len(ids) == len(triples) == expected or [triple[1] for triple in triples] != ids:
        raise EngineError(
            f"request {meta.get('id')}: {len(ids)} ids, {len(triples)} log-probs, {expected} counted; they must match"
        )
    segments: list[Segment] = []
    spans = _spans_of(meta, len(ids))
    covered, last = 0, sent_under
    for span in spans:
        start, end = span["start"], span["end"]
        if start != covered or not start <= end <= len(ids):
            raise EngineError(f"request {meta.get('id')}: version spans {spans} do not cover {len(ids)} tokens")
        covered = end
        if end > start:
            version = WeightVersion.parse(span["version"])
            masked = masked_heads and last not in (None, version)
            segments.append(_segment(ids[start:end], triples[start:end], version, masked))
            last = version
    if covered != len(ids):
        raise EngineError(f"request {meta.get('id')}: version spans {spans} do not cover {len(ids)} tokens")
    reason = FinishReason(meta["finish_reason"]["type"])
    if reason not in _ENDS:
        raise ValueError(f"finish reason {reason!r} is none of {', '.join(_ENDS)}")
    return Generation(tuple(segments), reason, int(meta.get("cached_tokens") or 0))


def _spans_of(meta: dict[str, Any], num_tokens: int) -> list[dict[str, Any]]:
    """Which version sampled which tokens: version, start, end."""
    return meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": num_tokens}]


def _segment(ids: list[int], triples: list[Any], version: WeightVersion, masked: bool) -> Segment:
    """Tokens of one version; raises what `_MALFORMED` lists if an id or a log-prob is none."""
    logprobs = np.array([triple[0] for triple in triples], np.float32)
    if not bool(np.isfinite(logprobs).all()):
        raise EngineError(f"version {version}: a log-prob is not finite")
    if (highest := float(logprobs.max())) > _ROUNDING:
        raise ValueError(f"log-prob {highest} is above 0")
    if (wrong := next((i for i in ids if type(i) is not int or i < 0), None)) is not None:
        raise ValueError(f"token id {wrong!r} is not a whole number of 0 or more")
    return sampled(ids, logprobs, version, int(masked))
