"""Answers of the engines' protocol: a stream's parts become one answer, an answer becomes a checked generation.

Invariants: ids and log-probs that do not match in number are an error, never padded; after an in-place swap the first token
of the later version is marked as masked. Pure: no I/O. This module does not know how answers travel.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from laminar.errors import EngineError
from laminar.types import FinishReason, Segment, WeightVersion, sampled
from rollout.generation import Generation

OnTokens = Callable[[list[int], list[float], WeightVersion], None]
"""Called with the ids, log-probs and version of every batch of new tokens."""


class AnswerStream:
    """A streamed answer as it grows, whether its parts are increments or repeat what came before."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self.ids: list[int] = []
        self._triples: list[Any] = []
        self._meta: dict[str, Any] = {}
        self._on_tokens = on_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the last part has come."""
        return bool(self._meta.get("finish_reason"))

    def add(self, answer: dict[str, Any]) -> None:
        """Take one part, and pass on its new tokens, once for each version among them."""
        known, meta = len(self.ids), answer["meta_info"]
        start = meta.get("completion_tokens", known) - len(answer["output_ids"])
        self.ids[start:] = answer["output_ids"]
        self._triples[start:] = meta.get("output_token_logprobs") or []
        self._meta = meta
        if len(self.ids) == len(self._triples):
            for span in spans_of(meta, len(self.ids)):
                new = slice(max(span["start"], known), span["end"])
                if ids := self.ids[new]:
                    logprobs = [triple[0] for triple in self._triples[new]]
                    self._on_tokens(ids, logprobs, WeightVersion.parse(span["version"]))

    def whole(self) -> dict[str, Any]:
        """The answer as if it had not been streamed."""
        return {"output_ids": self.ids, "meta_info": self._meta | {"output_token_logprobs": self._triples}}

    def broken_off(self) -> dict[str, Any]:
        """What has come, as an aborted answer."""
        self._meta["finish_reason"] = {"type": "abort", "message": "the stream broke off"}
        return self.whole()


def spans_of(meta: dict[str, Any], num_tokens: int) -> list[dict[str, Any]]:
    """Which version sampled which tokens: version, start, end."""
    return meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": num_tokens}]


def read_answer(answer: dict[str, Any], *, masked_heads: bool, sent_under: WeightVersion | None = None) -> Generation:
    """The generation in an answer of the protocol.

    Args:
        answer: `output_ids` and `meta_info`.
        masked_heads: whether the first token of every later version is kept out of the loss (in-place swaps).
        sent_under: the version when the request was sent; with another one, even the first token is a later version's.

    Raises:
        EngineError: if counts or spans do not fit.
    """
    meta = answer["meta_info"]
    ids = answer["output_ids"]
    triples = meta.get("output_token_logprobs") or []
    expected = meta.get("completion_tokens", len(ids))
    if not len(ids) == len(triples) == expected or [triple[1] for triple in triples] != ids:
        raise EngineError(
            f"request {meta.get('id')}: {len(ids)} ids, {len(triples)} log-probs, {expected} counted; they must match"
        )
    logprobs = np.array([triple[0] for triple in triples], np.float32)
    if not bool(np.isfinite(logprobs).all()):
        raise EngineError(f"request {meta.get('id')}: a log-prob is not finite")
    segments: list[Segment] = []
    spans = spans_of(meta, len(ids))
    covered = 0
    for span in spans:
        start, end = span["start"], span["end"]
        if start != covered or not start <= end <= len(ids):
            raise EngineError(f"request {meta.get('id')}: version spans {spans} do not cover {len(ids)} tokens")
        covered = end
        if end > start:
            version = WeightVersion.parse(span["version"])
            is_later = bool(segments) or (sent_under is not None and version != sent_under)
            segments.append(sampled(ids[start:end], logprobs[start:end], version, int(masked_heads and is_later)))
    if covered != len(ids):
        raise EngineError(f"request {meta.get('id')}: version spans {spans} do not cover {len(ids)} tokens")
    return Generation(tuple(segments), FinishReason(meta["finish_reason"]["type"]), int(meta.get("cached_tokens") or 0))
