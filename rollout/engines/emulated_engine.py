"""A continuous-batching engine without a model: who is admitted, preempted, ended, and how long each step would take.

One step: admit what fits (`begin`, which says how long prefill and each token take, and how many tokens until the first
request ends), then, as that time passes, give every running request so many tokens (`end`). Everything else (abort, pause,
new weights) happens at a token boundary, after which the caller begins a new step. Time is a number that is handed out; who
waits for it is the caller's business.

Invariants: used tokens never exceed the capacity; admission is first in, first out and optimistic, as in SGLang: when the
cache is full the youngest request is sent back to the queue's head and computed anew later; every token records the version
that sampled it; with unknown weights nothing is generated.
"""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar.errors import ConfigError
from laminar.simulate.timings import Lengths, StepTimes
from rollout.engines.book import EngineBook, Request
from rollout.engines.emulated_model import EmulatedModel
from rollout.engines.wire import EngineLoad, GenerateWire, Output, RankReport

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
        step_tokens: emulated tokens that each request gets in one step at most.
    """

    times: StepTimes
    lengths: Lengths
    max_running: int = 64
    max_cached_tokens: int = 65536
    prefill_tokens_per_second: float = 30_000.0
    token_scale: int = 1
    step_tokens: int = 1


@dataclass(slots=True, eq=False)
class EmulatedRequest(Request):
    """A request whose end is known: `until` is its length, prompt included, by `key`, what its noise hangs on."""

    key: int = 0
    until: int = 0

    @property
    def due_tokens(self) -> int:
        """How many it gets until it ends."""
        return min(self.budget_tokens, self.until - self.num_tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """What comes next, in seconds of the real engine.

    Attributes:
        prefill_seconds: before the first token.
        token_seconds: for each token.
        num_tokens: until the first request ends, the cache is full, or the step ends.
    """

    prefill_seconds: float
    token_seconds: float
    num_tokens: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.prefill_seconds + self.token_seconds * self.num_tokens


@dataclass(frozen=True, slots=True)
class EmulatedMachine:
    """The model and the prompts whose keys and values are there, as the book sees them."""

    model: EmulatedModel
    prefixes: "OrderedDict[tuple[int, str, bytes], None]"

    def swap(self, folder: Path) -> None:
        """As `Machine`."""
        self.model.swap(folder)

    def read_back(self, version: str) -> list[RankReport]:
        """The version's name; it holds no weights."""
        return [RankReport(0, version)]

    def flush(self) -> None:
        """As `Machine`."""
        self.prefixes.clear()

    def drop_finished(self, running: list[EmulatedRequest]) -> None:
        """As `Machine`; the order stays: the youngest are the last."""
        running[:] = [request for request in running if request.output.finish_reason is None]


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
        self.generated_tokens = self.num_retractions = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._model = EmulatedModel(folder, options.lengths)
        self._prefixes: OrderedDict[tuple[int, str, bytes], None] = OrderedDict()
        self.book = EngineBook(folder, version, EmulatedMachine(self._model, self._prefixes))
        self._token_seconds = 0.0

    def add(self, wire: GenerateWire) -> Output:
        """Queue a request; its output grows during later steps.

        Raises:
            ConfigError: if it can never be answered.
            EngineError: if the weights are unknown.
        """

        def make(output: Output) -> EmulatedRequest:
            sampling, limit = wire.sampling_params, self.options.max_cached_tokens
            if output.prompt_tokens + sampling.max_new_tokens > limit:
                raise ConfigError(
                    f"{output.prompt_tokens} prompt tokens + max_new_tokens {sampling.max_new_tokens} exceed "
                    f"max_cached_tokens {limit}; ask for less"
                )
            key = self._model.key_of(sampling.sampling_seed, sampling.temperature, wire.input_ids[0])
            begin = output.prompt_tokens - self._model.num_drawn(wire.input_ids, key)
            until = begin + self._model.answer_length(key, begin, 0.0 if sampling.ignore_eos else sampling.temperature)
            ends = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else self._model.end_ids)
            return EmulatedRequest(wire, output, ends, key=int(key), until=max(until, output.prompt_tokens + 1))

        return self.book.enter(wire, self._model.vocabulary_size, make)

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return EngineLoad(
            len(self.book.running),
            len(self.book.waiting),
            self._used(),
            self.options.max_cached_tokens,
            self.generated_tokens,
            num_retractions=self.num_retractions,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
        )

    # -- steps -------------------------------------------------------------------------------------------------------------

    def begin(self) -> Step:
        """Admit what fits; returns what comes next."""
        options = self.options
        prefill = self._admit() * options.token_scale / options.prefill_tokens_per_second
        self.prefill_seconds += prefill
        running = self.book.running
        if not running:
            return Step(prefill, 0.0, 0)
        context = sum(request.stored_tokens for request in running) * options.token_scale
        self._token_seconds = options.times.step_seconds(len(running), context) * options.token_scale
        room = (options.max_cached_tokens - self._used()) // len(running)
        num_tokens = min(options.step_tokens, room, min(request.due_tokens for request in running))
        return Step(prefill, self._token_seconds, max(1, num_tokens))

    def end(self, num_tokens: int) -> None:
        """Give every running request so many tokens, as many as end it at most."""
        if not self.book.has_work or not self.book.running:
            return
        self._make_room(num_tokens)
        running = list(self.book.running)
        counts = [min(num_tokens, request.due_tokens) for request in running]
        keys = np.repeat(np.array([request.key for request in running], np.uint64), counts)
        positions = np.concatenate(
            [request.num_tokens + np.arange(count) for request, count in zip(running, counts, strict=True)]
        )
        ends = np.repeat(np.array([request.until for request in running], np.int64), counts)
        tokens = np.where(positions + 1 >= ends, self._model.end_id, self._model.tokens(keys, positions))
        logprobs = self._model.logprobs(tokens, positions).tolist()
        start, ids = 0, tokens.tolist()
        for request, count in zip(running, counts, strict=True):
            self._extend(request, ids[start : start + count], logprobs[start : start + count])
            start += count
        self.decode_seconds += num_tokens * self._token_seconds
        self.book.drop_finished()

    def _admit(self) -> int:
        """Let waiting requests in while they fit; returns the tokens that have to be computed for them."""
        computed = 0
        while self.book.waiting and len(self.book.running) < self.options.max_running:
            request = self.book.waiting[0]
            growth = self.options.step_tokens * (len(self.book.running) + 1)
            if self.book.running and self._used() + request.num_tokens + growth > self.options.max_cached_tokens:
                break
            self.book.waiting.popleft()
            self.book.running.append(request)
            if request.wire.logprob_start_len == 0:
                ids = request.wire.input_ids
                scored = self._model.logprobs(np.array(ids[1:], np.int64), np.arange(1, len(ids)))
                request.output.score_input(ids, scored.tolist())
            request.stored_tokens = request.num_tokens
            computed += self._not_cached(request)
        return computed

    def _not_cached(self, request: EmulatedRequest) -> int:
        """Tokens of the request's context that no sibling's prompt has brought already."""
        if request.output.ids:
            return request.num_tokens
        key = (self.book.weights_count, request.wire.extra_key, np.array(request.wire.input_ids, np.int32).tobytes())
        if key in self._prefixes:
            self._prefixes.move_to_end(key)
            request.output.cached_tokens = request.num_tokens
            return 0
        self._prefixes[key] = None
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return request.num_tokens

    def _make_room(self, num_tokens: int) -> None:
        """Send the youngest requests back until so many tokens of everybody fit; the oldest stays."""
        running = self.book.running
        while len(running) > 1 and self._used() + num_tokens * len(running) > self.options.max_cached_tokens:
            self.num_retractions += 1
            self.book.retract(running[-1:])
            running = self.book.running

    def _extend(self, request: EmulatedRequest, ids: list[int], logprobs: list[float]) -> None:
        """Append tokens, up to the first that ends the answer."""
        for token, logprob in zip(ids, logprobs, strict=True):
            self.generated_tokens += 1
            if self.book.append(request, token, logprob):
                break
        request.stored_tokens = request.num_tokens

    def _used(self) -> int:
        return sum(request.stored_tokens for request in self.book.running)
