"""What a simulation measures, and the outcome it makes of it. Times before the first measured step do not count."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from laminar.simulate.engine import SimulatedEngine
from laminar.simulate.requests import Request

CURVE_SECONDS = 10.0
"""Time between two points of the generation curve."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run came to, from the first measured step to the last.

    Attributes:
        num_steps: measured.
        seconds: that they took.
        step_seconds: of each.
        tokens_per_second: trained tokens, given ones included, a second: the paper's throughput.
        trajectories_per_second: trained.
        generated_tokens_per_second: sampled by all replicas.
        staleness: share of trained trajectories by version trained on minus oldest version that sampled them.
        mean_staleness: of the same.
        staleness_at_end: share of them by version published when they ended minus oldest version: gained in flight.
        trainer_idle_share: of the time, in which the trainer waited for a batch or for a broadcast.
        rollout_idle_share: of the replicas' time, in which nothing ran.
        kv_use: mean share of the replicas' caches in use.
        wasted_share: of the sampled tokens, those of evicted trajectories.
        recomputed_tokens: context computed, a sampled token: prompts, moves, swaps, preemption.
        masked_share: of trained trajectories' sampled tokens, over age under policy `mask`.
        latency_mean_seconds, latency_max_seconds: of trained trajectories, from claim to end.
        swap_mean_seconds: what a replica stood still for new weights.
        released_replicas, moved_trajectories: by repack.
        num_retracted: requests sent back because a cache was full.
        admitted, trained, evicted, open: trajectories of the whole run; the first is the sum of the others.
        curve: (seconds, generated tokens a second) every 10 s, of the whole run.
    """

    num_steps: int
    seconds: float
    step_seconds: tuple[float, ...]
    tokens_per_second: float
    trajectories_per_second: float
    generated_tokens_per_second: float
    staleness: dict[int, float]
    mean_staleness: float
    staleness_at_end: dict[int, float]
    trainer_idle_share: float
    rollout_idle_share: float
    kv_use: float
    wasted_share: float
    recomputed_tokens: float
    masked_share: float
    latency_mean_seconds: float
    latency_max_seconds: float
    swap_mean_seconds: float
    released_replicas: int
    moved_trajectories: int
    num_retracted: int
    admitted: int
    trained: int
    evicted: int
    open: int
    curve: tuple[tuple[float, float], ...] = field(repr=False, default=())

    @property
    def max_staleness(self) -> int:
        """Of any trained trajectory."""
        return max(self.staleness, default=0)

    def figures(self) -> dict[str, Any]:
        """All but the curve, for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "curve"}


@dataclass(slots=True)
class _Mark:
    """Sums over all engines at one moment."""

    at: float
    generated: float
    recomputed: float
    busy: float
    kv: float


class Recorder:
    """Counts while the simulation runs.

    Args:
        engines: all of them.
        warm_steps: steps that are not measured.
        clock: the present, in simulated seconds.

    Attributes:
        stepped_at: when the last step ended.
        curve: (seconds, tokens generated since the start).
    """

    def __init__(self, engines: Sequence[SimulatedEngine], warm_steps: int, clock: Callable[[], float]) -> None:
        self._engines, self._warm_steps, self._clock = engines, warm_steps, clock
        self._begun = self._mark() if warm_steps == 0 else None
        self._ends: list[float] = []
        self._tokens = self._sampled = self._masked = self._idle = 0.0
        self._staleness: Counter[int] = Counter()
        self._at_end: Counter[int] = Counter()
        self._latencies: list[float] = []
        self.stepped_at = 0.0
        self.curve: list[tuple[float, float]] = []

    def wait(self, seconds: float) -> None:
        """The trainer stood idle."""
        if self._begun is not None:
            self._idle += seconds

    def train(self, requests: Sequence[Request], trained_on: int, oldest_trained: int) -> None:
        """A step has trained these."""
        if self._begun is None:
            return
        for request in requests:
            oldest = request.oldest
            masked = request.over_age_tokens(oldest_trained) if oldest < oldest_trained else 0.0
            self._staleness[trained_on - max(oldest, oldest_trained)] += 1
            self._at_end[request.published_at_end - oldest] += 1
            self._latencies.append(request.ended_at - request.started_at)
            self._tokens += request.context
            self._sampled += request.sampled
            self._masked += masked

    def end_step(self, step: int) -> None:
        """Step `step`, from 0, is published."""
        self.stepped_at = self._clock()
        if self._begun is not None:
            self._ends.append(self._clock())
        elif step + 1 >= self._warm_steps:
            self._begun = self._mark()

    def point(self) -> None:
        """One point of the curve: tokens generated since the start."""
        for engine in self._engines:
            engine.settle()
        self.curve.append((self._clock(), sum(engine.generated for engine in self._engines)))

    def outcome(self, **counts: Any) -> Outcome:
        """The end."""
        begun, end = self._begun or self._mark(), self._mark()
        seconds = max(end.at - begun.at, 1e-12)
        num_trained = sum(self._staleness.values())
        replicas = len(self._engines) * seconds
        generated = end.generated - begun.generated
        starts = [begun.at, *self._ends]
        points = zip(self.curve, self.curve[1:], strict=False)
        return Outcome(
            num_steps=len(self._ends),
            seconds=seconds,
            step_seconds=tuple(float(x) for x in np.diff(starts)),
            tokens_per_second=self._tokens / seconds,
            trajectories_per_second=num_trained / seconds,
            generated_tokens_per_second=generated / seconds,
            staleness={k: n / num_trained for k, n in sorted(self._staleness.items())},
            mean_staleness=sum(k * n for k, n in self._staleness.items()) / max(num_trained, 1),
            staleness_at_end={k: n / num_trained for k, n in sorted(self._at_end.items())},
            trainer_idle_share=min(1.0, self._idle / seconds),
            rollout_idle_share=max(0.0, 1 - (end.busy - begun.busy) / replicas),
            kv_use=(end.kv - begun.kv) / replicas,
            recomputed_tokens=(end.recomputed - begun.recomputed) / max(generated, 1.0),
            masked_share=self._masked / max(self._sampled, 1.0),
            latency_mean_seconds=float(np.mean(self._latencies)) if self._latencies else 0.0,
            latency_max_seconds=max(self._latencies, default=0.0),
            num_retracted=sum(engine.num_retracted for engine in self._engines),
            curve=tuple((now, (after - before) / (now - then)) for (then, before), (now, after) in points if now > then),
            **counts,
        )

    def _mark(self) -> _Mark:
        for engine in self._engines:
            engine.settle()
        return _Mark(
            self._clock(),
            sum(engine.generated for engine in self._engines),
            sum(engine.recomputed for engine in self._engines),
            sum(engine.busy_seconds for engine in self._engines),
            sum(engine.kv_seconds for engine in self._engines),
        )
