"""The engine protocol as values: what a request may hold, and how an answer looks (SGLang's names, see README.md here).

Invariants: an unknown field is refused, never ignored; log-probs and ids of an answer have one length.
This module knows neither torch nor HTTP.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from laminar.errors import ConfigError

RUN_HEADER = "X-Laminar-Run"
"""Names the run in every request: an engine obeys its own run only."""

PauseMode = Literal["abort", "retract", "in_place"]


class SamplingWire(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`sampling_params` of a request. Temperature 0 is greedy; `top_k` -1 and `top_p` 1 switch those filters off."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] | None = None
    sampling_seed: int = 0
    ignore_eos: bool = False


class GenerateWire(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `/generate`: one prompt as token ids. `logprob_start_len` 0 asks for the prompt's log-probs too, -1 not."""

    input_ids: list[int]
    rid: str
    sampling_params: SamplingWire = SamplingWire()
    return_logprob: bool = True
    stream: bool = False
    extra_key: str = ""
    logprob_start_len: int = -1

    def check(self, vocabulary_size: int) -> None:
        """Refuse what no engine could answer.

        Raises:
            ConfigError: with the value and the remedy.
        """
        sampling = self.sampling_params
        if not self.input_ids:
            raise ConfigError("input_ids is empty; send at least one token")
        if min(self.input_ids) < 0 or max(self.input_ids) >= vocabulary_size:
            raise ConfigError(f"input_ids hold an id outside [0, {vocabulary_size}); use the model's own tokenizer")
        if self.logprob_start_len not in (-1, 0):
            raise ConfigError(
                f"logprob_start_len {self.logprob_start_len} must be 0 (the whole prompt) or -1 (nothing of it)"
            )
        if sampling.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens {sampling.max_new_tokens} must be 1 or more")
        if not 0 <= sampling.temperature < float("inf"):
            raise ConfigError(f"temperature {sampling.temperature} must be finite and 0 or more")
        if not 0 < sampling.top_p <= 1:
            raise ConfigError(f"top_p {sampling.top_p} must lie in (0, 1]")
        if sampling.top_k != -1 and sampling.top_k < 1:
            raise ConfigError(f"top_k {sampling.top_k} must be -1 (off) or 1 or more")
        if not 0 <= sampling.sampling_seed < 2**63:
            raise ConfigError(f"sampling_seed {sampling.sampling_seed} must lie in [0, 2**63)")


class UpdateWire(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `/update_weights_from_disk`."""

    model_path: str
    weight_version: str
    flush_cache: bool = True


class PauseWire(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `/pause_generation`."""

    mode: PauseMode = "abort"


class AbortWire(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        running: requests being decoded.
        waiting: requests queued, those of a pause included.
        used_tokens: tokens in the key-value cache.
        capacity_tokens: the most it may hold.
        generated_tokens: tokens sampled since the engine started.
        num_retractions: requests sent back to the queue because the cache was full, since then; 0 if it does not tell.
        prefill_seconds, decode_seconds: time spent so since then; 0 if it does not tell.
    """

    running: int
    waiting: int
    used_tokens: int
    capacity_tokens: int
    generated_tokens: int
    num_retractions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank of an engine says of the weights it holds.

    Attributes:
        rank: its number.
        version: what it holds, as text.
        checksum: of what it read back; empty if it read nothing.
        problem: how that differs from what was published; empty if it does not.
    """

    rank: int
    version: str
    checksum: str = ""
    problem: str = ""


@dataclass(slots=True)
class Span:
    """Output tokens [start, end) sampled by one weight version."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Output:
    """What one request has produced so far.

    Attributes:
        ids, logprobs: one log-prob for every token id.
        spans: which version sampled which tokens.
        input_logprobs: (log-prob, id, None) of the prompt's tokens if they were asked for; the first has no log-prob.
        finish_reason: None while it runs.
    """

    rid: str
    prompt_tokens: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    cached_tokens: int = 0
    num_retractions: int = 0
    input_logprobs: list[tuple[float | None, int, None]] | None = None
    finish_reason: dict[str, Any] | None = None
    error: str = ""

    def score_input(self, ids: list[int], logprobs: list[float]) -> None:
        """Record log-probs of the prompt's tokens, of all but the first."""
        scored = zip(logprobs, ids[1:], strict=True)
        self.input_logprobs = [(None, ids[0], None), *((logprob, token, None) for logprob, token in scored)]

    def append(self, token: int, logprob: float, version: str) -> None:
        """Record one sampled token."""
        start = len(self.ids)
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = start + 1
        else:
            self.spans.append(Span(version, start, start + 1))

    def answer(self, version: str, start: int = 0) -> dict[str, Any]:
        """The JSON form; ids and log-probs from token `start` on (streams are incremental), the rest as of now.

        Args:
            version: the engine's present version, for an answer without tokens.
            start: first token that the reader has not seen.
        """
        spans = self.spans or [Span(version, 0, 0)]
        given = {} if self.input_logprobs is None else {"input_token_logprobs": self.input_logprobs}
        return {
            "output_ids": self.ids[start:],
            "meta_info": {
                "id": self.rid,
                "finish_reason": self.finish_reason,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.ids),
                "cached_tokens": self.cached_tokens,
                "num_retractions": self.num_retractions,
                **given,
                "weight_version": spans[-1].version,
                "weight_versions": [{"version": span.version, "start": span.start, "end": span.end} for span in spans],
                "output_token_logprobs": [
                    (logprob, token, None) for logprob, token in zip(self.logprobs[start:], self.ids[start:], strict=True)
                ],
            },
        }
