"""A continuous-batching engine on the CPU: requests join and leave at token boundaries.

One call of `step` admits what fits, prefills all admitted prompts together (equal ones once), and decodes one token for
every running request; for siblings that have drawn the same tokens so far, all but attention is computed once. Everything
else (abort, pause, new weights) happens between steps, so at a token boundary.

Invariants: admission is first in, first out (what only scores given tokens goes first) and reserves prompt +
`max_new_tokens`, so a running request never lacks room; row i of the key-value store belongs to `running[i]`; every token
records the version that sampled it; with unknown weights (a failed update) nothing is generated. This module is used by one
thread and knows no network.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laminar.errors import ConfigError, EngineError
from rollout.engines.book import EngineBook, Request, StepReport
from rollout.engines.key_values import KeyValues
from rollout.engines.prefix_cache import Prefix, PrefixCache
from rollout.engines.sampling import DrawRow, draw
from rollout.engines.torch_model import CausalModel
from rollout.engines.wire import EngineLoad, GenerateWire, Output, RankReport

PREFIX_SHARE = 4
"""The prompts kept for later siblings take at most one part in so many of the key-value capacity."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of an engine.

    Attributes:
        max_running: requests decoded at once.
        max_cached_tokens: capacity of the key-value store in tokens.
        max_prefill_tokens: tokens prefilled in one step (one longer prompt is prefilled alone).
        batch_invariant: see `CausalModel`.
    """

    max_running: int = 64
    max_cached_tokens: int = 65536
    max_prefill_tokens: int = 4096
    batch_invariant: bool = False


@dataclass(slots=True, eq=False)
class TorchRequest(Request):
    """A request of which `context` tells what its keys and values are: running ones with the same number have the same."""

    context: int = 0


@dataclass(frozen=True, slots=True)
class TorchMachine:
    """The model and the places of keys and values, as the book sees them."""

    model: CausalModel
    store: KeyValues
    prefixes: PrefixCache

    def swap(self, folder: Path) -> None:
        """As `Machine`."""
        self.model.swap(folder)

    def read_back(self, version: str) -> list[RankReport]:
        """Checksum the bytes that are served and compare them with the version's manifest, if its folder has one."""
        checksum, problem = self.model.read_back()
        return [RankReport(0, version, checksum, problem)]

    def flush(self) -> None:
        """As `Machine`."""
        self.prefixes.clear()
        self.store.release(0)

    def drop_finished(self, running: list[TorchRequest]) -> None:
        """As `Machine`; the last row moves into each hole, so that active rows stay 0 … n-1."""
        for row in reversed(range(len(running))):
            if running[row].output.finish_reason is not None:
                last = running.pop()
                if row < len(running):
                    self.store.copy_row(len(running), row, last.stored_tokens)
                    running[row] = last
        if not running:
            self.store.release(0)


class TorchEngine:
    """See the module.

    Args:
        folder: HF checkpoint of the first weights.
        version: their name.
        options: limits.

    Raises:
        EngineError: if the checkpoint is not served.
    """

    def __init__(self, folder: Path, version: str, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self.model = CausalModel(folder, batch_invariant=self.options.batch_invariant)
        self.generated_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._store = KeyValues(self.model.shape(), self.options.max_running)
        self._prefixes = PrefixCache(self.options.max_cached_tokens // PREFIX_SHARE)
        self.book = EngineBook(folder, version, TorchMachine(self.model, self._store, self._prefixes))

    def add(self, wire: GenerateWire) -> Output:
        """Queue a request; its output grows during later steps.

        Raises:
            ConfigError: if it can never be answered.
            EngineError: if the weights are unknown.
        """

        def make(output: Output) -> TorchRequest:
            stop = frozenset(wire.sampling_params.stop_token_ids or ())
            request = TorchRequest(wire, output, stop if wire.sampling_params.ignore_eos else stop | self.model.end_ids)
            limit = min(self.options.max_cached_tokens, self.model.max_tokens)
            if reserved_tokens(request) > limit:
                raise ConfigError(
                    f"{len(wire.input_ids)} prompt tokens + max_new_tokens {wire.sampling_params.max_new_tokens} exceed "
                    f"{limit} (max_cached_tokens {self.options.max_cached_tokens}, model's range {self.model.max_tokens}); "
                    "ask for less"
                )
            return request

        return self.book.enter(wire, self.model.vocabulary_size, make)

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        used = sum(request.stored_tokens for request in self.book.running) + self._prefixes.num_tokens
        return EngineLoad(
            len(self.book.running),
            len(self.book.waiting),
            used,
            self.options.max_cached_tokens,
            self.generated_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
        )

    def close(self) -> None:
        """Give the lock on the weights back."""
        self.model.close()

    # -- steps -------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepReport:
        """Admit what fits, advance every running request by one token; returns what changed since the last report."""
        if self.book.has_work:
            try:
                started = time.perf_counter()
                self._admit_and_prefill()
                prefilled = time.perf_counter()
                self._decode()
                self.prefill_seconds += prefilled - started
                self.decode_seconds += time.perf_counter() - prefilled
            except EngineError as error:
                self.book.fail_all(error)
                self._prefixes.clear()
        return self.book.report()

    def _admit_and_prefill(self) -> None:
        admitted: list[TorchRequest] = []
        new: dict[Any, list[TorchRequest]] = {}
        budget = self.options.max_prefill_tokens
        while self.book.waiting and len(self.book.running) < self.options.max_running:
            request = self.book.waiting[0]
            key = self._key(request)
            cost = 0 if key in new or self._prefixes.get(key) else request.num_tokens
            if (admitted and cost > budget) or not self._make_room(reserved_tokens(request)):
                break
            budget -= cost
            self.book.waiting.popleft()
            self.book.running.append(request)
            admitted.append(request)
            new.setdefault(key, []).append(request)
        if admitted:
            for request in admitted:
                if request.wire.logprob_start_len == 0 and request.output.input_logprobs is None:
                    request.output.score_input(request.wire.input_ids, self.model.score(request.wire.input_ids))
            self._store.fit(max(reserved_tokens(request) for request in admitted), len(self.book.running) - len(admitted))
            hidden = self._fill(new)
            place_of = {request.wire.rid: place for place, requests in enumerate(new.values()) for request in requests}
            contexts = [place_of[request.wire.rid] for request in admitted]
            unused = 1 + max(request.context for request in self.book.running)
            for request, place in zip(admitted, contexts, strict=True):
                request.context = unused + place
            self._draw(admitted, torch.stack([hidden[key] for key in new]), contexts)

    def _key(self, request: Request) -> Any:
        return (self.book.weights_count, request.wire.extra_key, tuple(ids_of(request)))

    def _make_room(self, num_tokens: int) -> bool:
        """Whether that many tokens can be reserved; drops stored prompts to make it so."""
        reserved = sum(reserved_tokens(request) for request in self.book.running) + num_tokens
        while reserved + self._prefixes.num_tokens > self.options.max_cached_tokens:
            if not self._prefixes.drop_oldest():
                return False
        return True

    def _fill(self, new: dict[Any, list[TorchRequest]]) -> dict[Any, torch.Tensor]:
        """Bring the rows of admitted requests up to date; returns the last hidden state (H,) of each distinct sequence.

        Every distinct sequence is computed once, all of them in one pass; the rest are copies.
        """
        row_of = {request.wire.rid: row for row, request in enumerate(self.book.running)}
        kept = {key: self._prefixes.get(key) for key in new}  # before any is dropped for the sake of another
        hidden: dict[Any, torch.Tensor] = {}
        unknown = [key for key in new if kept[key] is None]
        if unknown:
            firsts = [new[key][0] for key in unknown]
            states = self.model.prefill([ids_of(f) for f in firsts], [row_of[f.wire.rid] for f in firsts], self._store)
            hidden.update(zip(unknown, states, strict=True))
        for key, requests in new.items():
            num_tokens = len(key[2])
            stored = kept[key]
            first = requests[0]
            if stored is not None:
                hidden[key] = stored.last_hidden
            for request in requests:
                request.stored_tokens = num_tokens
                row = row_of[request.wire.rid]
                if stored is not None:
                    self._store.load_row(row, stored.key_values)
                elif request is not first:
                    self._store.copy_row(row_of[first.wire.rid], row, num_tokens)
                if (stored is not None or request is not first) and not request.output.ids:
                    request.output.cached_tokens = num_tokens
            if stored is None and not first.output.ids:
                self._keep(key, row_of[first.wire.rid], hidden[key])
        return hidden

    def _keep(self, key: Any, row: int, last_hidden: torch.Tensor) -> None:
        """Store a prompt for later siblings if there is room without crowding out requests."""
        num_tokens = len(key[2])
        reserved = sum(reserved_tokens(request) for request in self.book.running)
        if self._prefixes.has_room(num_tokens) and reserved + num_tokens <= self.options.max_cached_tokens:
            while reserved + num_tokens + self._prefixes.num_tokens > self.options.max_cached_tokens:
                self._prefixes.drop_oldest()
            self._prefixes.put(key, Prefix(num_tokens, self._store.save_row(row, num_tokens), last_hidden.clone()))

    def _decode(self) -> None:
        if not self.book.running:
            return
        running = list(self.book.running)
        ids = [request.output.ids[-1] for request in running]
        lengths = [request.stored_tokens for request in running]
        numbers: dict[tuple[int, int], int] = {}
        for request, token in zip(running, ids, strict=True):
            request.context = numbers.setdefault((request.context, token), len(numbers))
            request.stored_tokens += 1
        contexts = [request.context for request in running]
        self._draw(running, self.model.decode(ids, lengths, contexts, self._store), contexts)

    def _draw(self, requests: list[TorchRequest], hidden: torch.Tensor, contexts: list[int]) -> None:
        """Draw one token for each request and end those that are done; `hidden` (C, H) is of their contexts."""
        logits = self.model.logits(hidden)
        logits = logits[contexts] if len(logits) < len(contexts) else logits
        ids, logprobs = draw(logits, [draw_row(request) for request in requests])
        self.generated_tokens += len(ids)
        for request, token, logprob in zip(requests, ids, logprobs, strict=True):
            self.book.append(request, token, logprob)
        self.book.drop_finished()


def ids_of(request: Request) -> list[int]:
    """Prompt and output."""
    return [*request.wire.input_ids, *request.output.ids]


def reserved_tokens(request: Request) -> int:
    """The most places it can come to need."""
    return len(request.wire.input_ids) + request.wire.sampling_params.max_new_tokens


def draw_row(request: Request) -> DrawRow:
    """How its next token is drawn."""
    sampling = request.wire.sampling_params
    return DrawRow(sampling.temperature, sampling.top_p, sampling.top_k, sampling.sampling_seed, request.num_tokens)
