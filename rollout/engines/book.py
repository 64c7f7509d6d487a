"""An engine's book: who waits, who runs, whether it is paused, and under which weights. One for all engines of ours.

Invariants: with unknown weights (a failed update) nothing is taken in and nothing has work; weights change only while
nothing can be generated; every request ends exactly once, with a reason. It knows neither models, caches nor time: those are
its *machine's*.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from laminar.errors import ConfigError, EngineError
from rollout.engines.wire import GenerateWire, Output, PauseMode, RankReport


@dataclass(slots=True, eq=False)
class Request:
    """A request and what it has produced.

    Attributes:
        wire: as it was asked.
        output: grows.
        end_ids: tokens that end it.
        stored_tokens: tokens whose keys and values are in the cache.
    """

    wire: GenerateWire
    output: Output
    end_ids: frozenset[int]
    stored_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.wire.input_ids) + len(self.output.ids)

    @property
    def budget_tokens(self) -> int:
        """How many it may still sample."""
        return self.wire.sampling_params.max_new_tokens - len(self.output.ids)


@dataclass(slots=True)
class StepReport:
    """Outputs that grew or ended since the last report, in order; an ended one has a finish reason or an error."""

    outputs: dict[str, Output] = field(default_factory=dict)


R = TypeVar("R", bound=Request)
R_contra = TypeVar("R_contra", bound=Request)


class Machine(Protocol[R_contra]):
    """What computes: the engine's model and its cache."""

    def swap(self, folder: Path) -> None:
        """Serve the weights in a folder, or raise `EngineError`."""
        ...

    def read_back(self, version: str) -> list[RankReport]:
        """What each rank holds, where `version` is the name of it."""
        ...

    def flush(self) -> None:
        """Forget all keys and values; nothing runs."""
        ...

    def drop_finished(self, running: list[R_contra]) -> None:
        """Take requests with a finish reason out of this list; what is not in it holds no keys and values any more."""
        ...


class EngineBook(Generic[R]):
    """See the module.

    Args:
        folder: HF checkpoint of the first weights.
        version: their name.
        machine: holds these weights.

    Attributes:
        running: requests being decoded.
        waiting: requests in the order of their admission.
        weights_count: how many updates there were.
    """

    def __init__(self, folder: Path, version: str, machine: Machine[R]) -> None:
        self.folder, self.version = folder, version
        self.weights_known, self.paused = True, False
        self.running: list[R] = []
        self.waiting: deque[R] = deque()
        self.weights_count = 0
        self._machine = machine
        self._report = StepReport()

    @property
    def has_work(self) -> bool:
        """Whether a step would generate something."""
        return not self.paused and self.weights_known and bool(self.running or self.waiting)

    def enter(self, wire: GenerateWire, vocabulary_size: int, make: Callable[[Output], R]) -> Output:
        """Queue a request, once it has been checked; its output grows during later steps.

        What only scores given tokens goes first: after a swap, answers are held back until a probe has been scored.

        Args:
            wire: as it was asked.
            vocabulary_size: ids are below it.
            make: the request around its output; refuses what does not fit the machine.

        Raises:
            ConfigError: if it can never be answered.
            EngineError: if the weights are unknown.
        """
        wire.check(vocabulary_size)
        if not self.weights_known:
            raise EngineError("the weights are unknown after a failed update; load a whole version first")
        if any(other.wire.rid == wire.rid for other in (*self.running, *self.waiting)):
            raise ConfigError(f"request id {wire.rid!r} is in use; choose another")
        request = make(Output(wire.rid, len(wire.input_ids)))
        if wire.logprob_start_len == 0:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
        return request.output

    def abort(self, rid: str | None) -> int:
        """End one request (or all, for None) with what it has; returns how many there were."""
        ended = [request for request in (*self.running, *self.waiting) if rid is None or request.wire.rid == rid]
        for request in ended:
            self.finish(request, {"type": "abort", "message": "aborted by request", "status_code": None, "err_type": None})
        self.drop_finished()
        return len(ended)

    def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`. Running requests are ended, sent back to the queue's head, or kept."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self.retract(list(self.running))

    def retract(self, requests: list[R]) -> None:
        """Send running requests, named in their order, back to the queue's head; they are computed anew later."""
        for request in reversed(requests):
            self.running.remove(request)
            request.stored_tokens = 0
            request.output.num_retractions += 1
            self.waiting.appendleft(request)
        self._machine.drop_finished(self.running)

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
        if not self.paused and (self.running or self.waiting):
            raise ConfigError(
                f"{len(self.running) + len(self.waiting)} requests are running; pause generation before an update"
            )
        if flush_cache:
            self.flush_cache()
        try:
            self._machine.swap(folder)
        except EngineError:
            self.weights_known = False
            raise
        self.folder, self.version, self.weights_known = folder, version, True
        self.weights_count += 1

    def read_back(self) -> list[RankReport]:
        """What each rank holds."""
        return self._machine.read_back(self.version)

    def flush_cache(self) -> None:
        """Drop all keys and values.

        Raises:
            ConfigError: if running requests hold some.
        """
        if self.running:
            raise ConfigError(f"{len(self.running)} requests hold keys and values; pause with mode retract before a flush")
        self._machine.flush()

    def append(self, request: R, token: int, logprob: float) -> bool:
        """Record a sampled token; whether it ends the request."""
        output = request.output
        output.append(token, logprob, self.version)
        self._report.outputs[output.rid] = output
        if token in request.end_ids:
            self.finish(request, {"type": "stop", "matched": token})
        elif request.budget_tokens <= 0:
            self.finish(request, {"type": "length", "length": len(output.ids)})
        return output.finish_reason is not None

    def finish(self, request: R, reason: dict[str, Any]) -> None:
        """End a request; it stays in its list until `drop_finished`."""
        request.output.finish_reason = reason
        self._report.outputs[request.output.rid] = request.output

    def drop_finished(self) -> None:
        """Take ended requests out."""
        self.waiting = deque(request for request in self.waiting if request.output.finish_reason is None)
        self._machine.drop_finished(self.running)

    def fail_all(self, error: EngineError) -> None:
        """Broken weights: everybody is told, nothing is generated until others are loaded."""
        self.weights_known = False
        for request in (*self.running, *self.waiting):
            request.output.error = str(error)
            self.finish(request, {"type": "abort", "message": str(error), "status_code": 500, "err_type": "broken_weights"})
        self.drop_finished()

    def report(self) -> StepReport:
        """What has changed since the last report."""
        report, self._report = self._report, StepReport()
        return report
