"""A continuous-batching engine without a model: who is admitted, preempted, ended, and how long each step would take.

One step: admit what fits (`begin`, which says how long the step takes), then, when that time has passed, give every running
request its tokens (`end`). Everything else (abort, pause, new weights) happens between the two or between steps, so at a
token boundary. Time is a number that is handed out; who waits for it is the caller's business.

Invariants: used tokens never exceed the capacity; admission is first in, first out and optimistic, as in SGLang: when the
cache is full the youngest request is sent back to the queue's head and computed anew later; every token records the version
that sampled it; with unknown weights nothing is generated.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laminar.errors import ConfigError, EngineError
from laminar.simulate.timings import Lengths, StepTimes
from rollout.engines.door import StepReport
from rollout.engines.emulated_model import EmulatedModel
from rollout.engines.wire import EngineLoad, GenerateWire, Output, PauseMode

MAX_PREFIXES = 1024
"""Prompts remembered for later siblings; they take no room."""


@dataclass(frozen=True, slots=True)
class EmulatedOptions:
    """What an engine pretends to be.

    Attributes:
        times: of a decode step.
        lengths: of answers, in emulated tokens.
        max_running: requests decoded at once.
        max_cached_tokens: capacity of the key-value cache in emulated tokens.
        prefill_tokens_per_second: real tokens of context computed in a second.
        token_scale: how many tokens of the real engine one emulated token stands for.
        step_tokens: emulated tokens that each request gets in one step.
    """

    times: StepTimes
    lengths: Lengths
    max_running: int = 64
    max_cached_tokens: int = 65536
    prefill_tokens_per_second: float = 30_000.0
    token_scale: int = 1
    step_tokens: int = 1


@dataclass(slots=True, eq=False)
class Request:
    """A request and what it has produced."""

    wire: GenerateWire
    output: Output
    key: np.uint64
    end_ids: frozenset[int]
    until: int
    stored_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.wire.input_ids) + len(self.output.ids)


class EmulatedEngine:
    """See the module.

    Args:
        folder: HF checkpoint of the first weights.
        version: their name.
        options: what to pretend.

    Raises:
        EngineError: if it is no checkpoint.
    """

    def __init__(self, folder: Path, version: str, options: EmulatedOptions) -> None:
        self.options = options
        self.folder, self.version = folder, version
        self.weights_known, self.paused = True, False
        self.generated_tokens = self.num_retractions = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._model = EmulatedModel(folder, options.lengths)
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._prefixes: OrderedDict[tuple[int, str, bytes], None] = OrderedDict()
        self._weights_count = 0
        self._report = StepReport()

    # -- requests ----------------------------------------------------------------------------------------------------------

    def add(self, wire: GenerateWire) -> Output:
        """Queue a request; its output grows during later steps.

        Raises:
            ConfigError: if it can never be answered.
            EngineError: if the weights are unknown.
        """
        wire.check(self._model.vocabulary_size)
        if not self.weights_known:
            raise EngineError("the weights are unknown after a failed update; load a whole version first")
        sampling, num_prompt = wire.sampling_params, len(wire.input_ids)
        limit = self.options.max_cached_tokens
        if num_prompt + sampling.max_new_tokens > limit:
            raise ConfigError(
                f"{num_prompt} prompt tokens + max_new_tokens {sampling.max_new_tokens} exceed max_cached_tokens {limit}; "
                "ask for less"
            )
        if any(other.wire.rid == wire.rid for other in (*self._running, *self._waiting)):
            raise ConfigError(f"request id {wire.rid!r} is in use; choose another")
        key = self._model.key_of(sampling.sampling_seed, sampling.temperature, wire.input_ids[0])
        begin = num_prompt - self._model.num_drawn(wire.input_ids, key)
        until = begin + self._model.answer_length(key, begin, 0.0 if sampling.ignore_eos else sampling.temperature)
        ends = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else self._model.end_ids)
        request = Request(wire, Output(wire.rid, num_prompt), key, ends, max(until, num_prompt + 1))
        self._waiting.append(request)
        return request.output

    def abort(self, rid: str | None) -> int:
        """End one request (or all, for None) with what it has; returns how many there were."""
        ended = [request for request in (*self._running, *self._waiting) if rid is None or request.wire.rid == rid]
        for request in ended:
            self._finish(request, {"type": "abort", "message": "aborted by request", "status_code": None, "err_type": None})
        self._drop_finished()
        return len(ended)

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return EngineLoad(
            len(self._running),
            len(self._waiting),
            self._used(),
            self.options.max_cached_tokens,
            self.generated_tokens,
            num_retractions=self.num_retractions,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
        )

    # -- weights -----------------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`. Running requests are ended, sent back to the queue's head, or kept."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for request in reversed(list(self._running)):
                self._retract(request)

    def resume(self) -> None:
        """Go on generating.

        Raises:
            EngineError: if the weights are unknown.
        """
        if not self.weights_known:
            raise EngineError("the weights are unknown after a failed update; load a whole version before going on")
        self.paused = False

    def update_weights(self, folder: Path, version: str, flush_cache: bool) -> None:
        """Stand for other weights.

        Raises:
            ConfigError: if requests are in the way; nothing has changed.
            EngineError: if loading fails: the weights count as unknown from then on.
        """
        if not self.paused and (self._running or self._waiting):
            raise ConfigError(
                f"{len(self._running) + len(self._waiting)} requests are running; pause generation before an update"
            )
        if flush_cache:
            self.flush_cache()
        try:
            self._model.swap(folder)
        except EngineError:
            self.weights_known = False
            raise
        self.folder, self.version, self.weights_known = folder, version, True
        self._weights_count += 1

    def flush_cache(self) -> None:
        """Drop all keys and values.

        Raises:
            ConfigError: if running requests hold some.
        """
        if self._running:
            raise ConfigError(f"{len(self._running)} requests hold keys and values; pause with mode retract before a flush")
        self._prefixes.clear()

    # -- steps -------------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would generate something."""
        return not self.paused and self.weights_known and bool(self._running or self._waiting)

    def begin(self) -> float:
        """Admit what fits; returns the seconds that the step takes in the real engine."""
        options = self.options
        prefilled = self._admit() * options.token_scale
        prefill = prefilled / options.prefill_tokens_per_second
        context = sum(request.stored_tokens for request in self._running) * options.token_scale
        tokens = options.step_tokens * options.token_scale
        decode = options.times.step_seconds(len(self._running), context) * tokens if self._running else 0.0
        self.prefill_seconds += prefill
        self.decode_seconds += decode
        return prefill + decode

    def end(self) -> None:
        """Give every running request its tokens, as many as end it at most."""
        if not self.has_work or not self._running:
            return
        self._make_room()
        counts = [self._num_due(request) for request in self._running]
        keys = np.repeat(np.array([request.key for request in self._running], np.uint64), counts)
        positions = np.concatenate(
            [request.num_tokens + np.arange(count) for request, count in zip(self._running, counts, strict=True)]
        )
        ends = np.repeat(np.array([request.until for request in self._running], np.int64), counts)
        tokens = np.where(positions + 1 >= ends, self._model.end_id, self._model.tokens(keys, positions))
        logprobs = self._model.logprobs(tokens, positions).tolist()
        start, ids = 0, tokens.tolist()
        for request, count in zip(self._running, counts, strict=True):
            self._extend(request, ids[start : start + count], logprobs[start : start + count])
            start += count
        self._drop_finished()

    def report(self) -> StepReport:
        """What has changed since the last report."""
        report, self._report = self._report, StepReport()
        return report

    def _admit(self) -> int:
        """Let waiting requests in while they fit; returns the tokens that have to be computed for them."""
        computed = 0
        while self._waiting and len(self._running) < self.options.max_running:
            request = self._waiting[0]
            growth = self.options.step_tokens * (len(self._running) + 1)
            if self._running and self._used() + request.num_tokens + growth > self.options.max_cached_tokens:
                break
            self._waiting.popleft()
            self._running.append(request)
            request.stored_tokens = request.num_tokens
            computed += self._not_cached(request)
        return computed

    def _not_cached(self, request: Request) -> int:
        """Tokens of the request's context that no sibling's prompt has brought already."""
        if request.output.ids:
            return request.num_tokens
        key = (self._weights_count, request.wire.extra_key, np.array(request.wire.input_ids, np.int32).tobytes())
        if key in self._prefixes:
            self._prefixes.move_to_end(key)
            request.output.cached_tokens = request.num_tokens
            return 0
        self._prefixes[key] = None
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return request.num_tokens

    def _make_room(self) -> None:
        """Send the youngest requests back until this step's tokens fit; the oldest stays."""
        while (
            len(self._running) > 1
            and self._used() + self.options.step_tokens * len(self._running) > self.options.max_cached_tokens
        ):
            self.num_retractions += 1
            self._retract(self._running[-1])

    def _retract(self, request: Request) -> None:
        self._running.remove(request)
        request.stored_tokens = 0
        request.output.num_retractions += 1
        self._waiting.appendleft(request)

    def _num_due(self, request: Request) -> int:
        left = request.wire.sampling_params.max_new_tokens - len(request.output.ids)
        return min(self.options.step_tokens, left, request.until - request.num_tokens)

    def _extend(self, request: Request, ids: list[int], logprobs: list[float]) -> None:
        """Append tokens, up to the first that ends the answer."""
        output = request.output
        for token, logprob in zip(ids, logprobs, strict=True):
            output.append(token, logprob, self.version)
            self.generated_tokens += 1
            if token in request.end_ids:
                self._finish(request, {"type": "stop", "matched": token})
                break
        else:
            if len(output.ids) >= request.wire.sampling_params.max_new_tokens:
                self._finish(request, {"type": "length", "length": len(output.ids)})
        request.stored_tokens = request.num_tokens
        self._report.outputs[output.rid] = output

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.output.finish_reason = reason
        self._report.outputs[request.output.rid] = request.output

    def _drop_finished(self) -> None:
        self._waiting = deque(request for request in self._waiting if request.output.finish_reason is None)
        self._running = [request for request in self._running if request.output.finish_reason is None]

    def _used(self) -> int:
        return sum(request.stored_tokens for request in self._running)
