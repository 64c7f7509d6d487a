"""A continuous-batching engine on the CPU: requests join and leave at token boundaries.

One call of `step` admits what fits, prefills all admitted prompts together (equal ones once), and decodes one token for
every running request. Everything else (abort, pause, new weights) happens between steps, so at a token boundary.

Invariants: admission is first in, first out and reserves prompt + `max_new_tokens`, so a running request never lacks room;
row i of the key-value store belongs to `running[i]`; every token records the version that sampled it; with unknown weights
(a failed update) nothing is generated. This module is used by one thread and knows no network.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laminar.errors import ConfigError, EngineError
from rollout.engines.door import StepReport
from rollout.engines.key_values import KeyValues
from rollout.engines.prefix_cache import Prefix, PrefixCache
from rollout.engines.sampling import DrawRow, draw
from rollout.engines.torch_model import CausalModel
from rollout.engines.wire import EngineLoad, GenerateWire, Output, PauseMode, RankReport

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
class Request:
    """A request and what it has produced."""

    wire: GenerateWire
    output: Output
    end_ids: frozenset[int]
    stored_tokens: int = 0

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.wire.input_ids, *self.output.ids]

    @property
    def reserved_tokens(self) -> int:
        """The most places it can come to need."""
        return len(self.wire.input_ids) + self.wire.sampling_params.max_new_tokens

    def draw_row(self) -> DrawRow:
        """How its next token is drawn."""
        sampling = self.wire.sampling_params
        position = len(self.wire.input_ids) + len(self.output.ids)
        return DrawRow(sampling.temperature, sampling.top_p, sampling.top_k, sampling.sampling_seed, position)


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
        self.folder = folder
        self.version = version
        self.weights_known = True
        self.paused = False
        self.generated_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._weights_count = 0
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._report = StepReport()
        self._store = KeyValues(self.model.shape(), self.options.max_running)
        self._prefixes = PrefixCache(self.options.max_cached_tokens // PREFIX_SHARE)

    # -- requests ----------------------------------------------------------------------------------------------------------

    def add(self, wire: GenerateWire) -> Output:
        """Queue a request; its output grows during later steps.

        Raises:
            ConfigError: if it can never be answered.
            EngineError: if the weights are unknown.
        """
        wire.check(self.model.vocabulary_size)
        if not self.weights_known:
            raise EngineError("the weights are unknown after a failed update; load a whole version first")
        stop = frozenset(wire.sampling_params.stop_token_ids or ())
        ends = stop if wire.sampling_params.ignore_eos else stop | self.model.end_ids
        request = Request(wire, Output(wire.rid, len(wire.input_ids)), ends)
        limit = min(self.options.max_cached_tokens, self.model.max_tokens)
        if request.reserved_tokens > limit:
            raise ConfigError(
                f"{len(wire.input_ids)} prompt tokens + max_new_tokens {wire.sampling_params.max_new_tokens} exceed {limit} "
                f"(max_cached_tokens {self.options.max_cached_tokens}, model's range {self.model.max_tokens}); ask for less"
            )
        if any(other.wire.rid == wire.rid for other in (*self._running, *self._waiting)):
            raise ConfigError(f"request id {wire.rid!r} is in use; choose another")
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
        used = sum(request.stored_tokens for request in self._running) + self._prefixes.num_tokens
        return EngineLoad(
            len(self._running),
            len(self._waiting),
            used,
            self.options.max_cached_tokens,
            self.generated_tokens,
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
            for request in self._running:
                request.stored_tokens = 0
                request.output.num_retractions += 1
            self._waiting.extendleft(reversed(self._running))
            self._running = []
            self._store.release(0)

    def resume(self) -> None:
        """Go on generating.

        Raises:
            EngineError: if the weights are unknown.
        """
        if not self.weights_known:
            raise EngineError("the weights are unknown after a failed update; load a whole version before going on")
        self.paused = False

    def update_weights(self, folder: Path, version: str, flush_cache: bool) -> None:
        """Serve other weights.

        Args:
            folder: holds `model.safetensors`.
            version: its name.
            flush_cache: drop all keys and values; refused while running requests hold some.

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
            self.model.swap(folder)
        except EngineError:
            self.weights_known = False
            raise
        self.folder, self.version, self.weights_known = folder, version, True
        self._weights_count += 1

    def read_back(self) -> list[RankReport]:
        """Checksum the bytes that are served and compare them with the version's manifest, if its folder has one."""
        checksum, problem = self.model.read_back()
        return [RankReport(0, self.version, checksum, problem)]

    def flush_cache(self) -> None:
        """Drop all keys and values.

        Raises:
            ConfigError: if running requests hold some.
        """
        if self._running:
            raise ConfigError(f"{len(self._running)} requests hold keys and values; pause with mode retract before a flush")
        self._prefixes.clear()
        self._store.release(0)

    def close(self) -> None:
        """Give the lock on the weights back."""
        self.model.close()

    # -- steps -------------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would generate something."""
        return not self.paused and self.weights_known and bool(self._running or self._waiting)

    @torch.inference_mode()
    def step(self) -> StepReport:
        """Admit what fits, advance every running request by one token; returns what changed since the last report."""
        if self.has_work:
            try:
                started = time.perf_counter()
                self._admit_and_prefill()
                prefilled = time.perf_counter()
                self._decode()
                self.prefill_seconds += prefilled - started
                self.decode_seconds += time.perf_counter() - prefilled
            except EngineError as error:
                self._fail_all(error)
        report, self._report = self._report, StepReport()
        return report

    def _admit_and_prefill(self) -> None:
        admitted: list[Request] = []
        new: dict[Any, list[Request]] = {}
        budget = self.options.max_prefill_tokens
        while self._waiting and len(self._running) < self.options.max_running:
            request = self._waiting[0]
            key = self._key(request)
            cost = 0 if key in new or self._prefixes.get(key) else len(request.ids)
            if (admitted and cost > budget) or not self._make_room(request.reserved_tokens):
                break
            budget -= cost
            self._waiting.popleft()
            self._running.append(request)
            admitted.append(request)
            new.setdefault(key, []).append(request)
        if admitted:
            for request in admitted:
                if request.wire.logprob_start_len == 0 and request.output.input_logprobs is None:
                    request.output.score_input(request.wire.input_ids, self.model.score(request.wire.input_ids))
            self._store.fit(max(request.reserved_tokens for request in admitted), len(self._running) - len(admitted))
            hidden = self._fill(new)
            self._draw(admitted, torch.stack([hidden[request.wire.rid] for request in admitted]))

    def _key(self, request: Request) -> Any:
        return (self._weights_count, request.wire.extra_key, tuple(request.ids))

    def _make_room(self, num_tokens: int) -> bool:
        """Whether that many tokens can be reserved; drops stored prompts to make it so."""
        reserved = sum(request.reserved_tokens for request in self._running) + num_tokens
        while reserved + self._prefixes.num_tokens > self.options.max_cached_tokens:
            if not self._prefixes.drop_oldest():
                return False
        return True

    def _fill(self, new: dict[Any, list[Request]]) -> dict[str, torch.Tensor]:
        """Bring the rows of admitted requests up to date; returns the last hidden state (H,) of each, by request id.

        Every distinct sequence is computed once, all of them in one pass; the rest are copies.
        """
        row_of = {request.wire.rid: row for row, request in enumerate(self._running)}
        hidden: dict[str, torch.Tensor] = {}
        unknown = [key for key in new if self._prefixes.get(key) is None]
        if unknown:
            firsts = [new[key][0] for key in unknown]
            states = self.model.prefill([f.ids for f in firsts], [row_of[f.wire.rid] for f in firsts], self._store)
            hidden.update({first.wire.rid: state for first, state in zip(firsts, states, strict=True)})
        for key, requests in new.items():
            num_tokens = len(key[2])
            stored = self._prefixes.get(key)
            first = requests[0]
            for request in requests:
                request.stored_tokens = num_tokens
                row = row_of[request.wire.rid]
                if stored is not None:
                    self._store.load_row(row, stored.key_values)
                    hidden[request.wire.rid] = stored.last_hidden
                elif request is not first:
                    self._store.copy_row(row_of[first.wire.rid], row, num_tokens)
                    hidden[request.wire.rid] = hidden[first.wire.rid]
                if (stored is not None or request is not first) and not request.output.ids:
                    request.output.cached_tokens = num_tokens
            if stored is None and not first.output.ids:
                self._keep(key, row_of[first.wire.rid], hidden[first.wire.rid])
        return hidden

    def _keep(self, key: Any, row: int, last_hidden: torch.Tensor) -> None:
        """Store a prompt for later siblings if there is room without crowding out requests."""
        num_tokens = len(key[2])
        reserved = sum(request.reserved_tokens for request in self._running)
        if self._prefixes.has_room(num_tokens) and reserved + num_tokens <= self.options.max_cached_tokens:
            while reserved + num_tokens + self._prefixes.num_tokens > self.options.max_cached_tokens:
                self._prefixes.drop_oldest()
            self._prefixes.put(key, Prefix(num_tokens, self._store.save_row(row, num_tokens), last_hidden.clone()))

    def _decode(self) -> None:
        if not self._running:
            return
        ids = [request.output.ids[-1] for request in self._running]
        lengths = [request.stored_tokens for request in self._running]
        hidden = self.model.decode(ids, lengths, self._store)
        for request in self._running:
            request.stored_tokens += 1
        self._draw(list(self._running), hidden)

    def _draw(self, requests: list[Request], hidden: torch.Tensor) -> None:
        """Draw one token for each request and end those that are done."""
        ids, logprobs = draw(self.model.logits(hidden), [request.draw_row() for request in requests])
        self.generated_tokens += len(ids)
        for request, token, logprob in zip(requests, ids, logprobs, strict=True):
            output = request.output
            output.append(token, logprob, self.version)
            self._report.outputs[output.rid] = output
            if token in request.end_ids:
                self._finish(request, {"type": "stop", "matched": token})
            elif len(output.ids) >= request.wire.sampling_params.max_new_tokens:
                self._finish(request, {"type": "length", "length": len(output.ids)})
        self._drop_finished()

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.output.finish_reason = reason
        self._report.outputs[request.output.rid] = request.output

    def _drop_finished(self) -> None:
        """Take ended requests out; the last row moves into each hole, so that active rows stay 0 … n-1."""
        self._waiting = deque(request for request in self._waiting if request.output.finish_reason is None)
        before = len(self._running)
        for row in reversed(range(len(self._running))):
            if self._running[row].output.finish_reason is not None:
                last = self._running.pop()
                if row < len(self._running):
                    self._store.copy_row(len(self._running), row, last.stored_tokens)
                    self._running[row] = last
        if before and not self._running:
            self._store.release(0)

    def _fail_all(self, error: EngineError) -> None:
        """Broken weights: everybody is told, nothing is generated until others are loaded."""
        self.weights_known = False
        for request in (*self._running, *self._waiting):
            request.output.error = str(error)
            self._finish(request, {"type": "abort", "message": str(error), "status_code": 500, "err_type": "broken_weights"})
        self._drop_finished()
        self._prefixes.clear()
