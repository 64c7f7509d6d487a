"""What an observer knows of a run: the latest of everything, and totals that are right over the whole life (pure).

Throughput uses one span above and below the line: tokens of a step over the seconds since the last step ended. Tokens are
means of tokens, never means of means. Generated and trained are two numbers.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from laminar.telemetry.stream import Event
from laminar.telemetry.totals import Total

SUMMED_OVER_WORKERS = ("experience/producer_wait_seconds", "worker/resumed_tokens")
"""What each worker counts since its start, shown with every step as a sum over all workers and their lives."""
COUNTED_BY_THE_TRAINER = ("staleness/dropped_groups", "weights/skipped_publishes")
"""What a life of the trainer counts, shown with every step as a sum over its lives."""

LARGEST = (
    "weights/broadcast_seconds",
    "weights/broadcast_bytes",
    "weights/broken_pieces",
    "weights/pull_seconds",
    "weights/probe_difference_nats",
    "weights/swap_seconds",
)
SMALLEST = ("weights/broadcast_bytes_per_second", "weights/pull_bytes_per_second")
"""What relays and workers last measured of a version, shown with every step as that of the worst of them."""

PACE_SECONDS = 10.0
"""Over how much of the last steps a line tells generated tokens a second."""
REMEMBERED_STEPS = 1000
"""That a late report is held against."""

UNKNOWN = -1.0
"""Version number of an engine that is being restarted."""


@dataclass(slots=True)
class GenerationMeter:
    """Splits generated tokens into those made while a step was running and the others.

    Workers report running totals; between two reports tokens are taken as evenly spread. A report may come after the end
    of a step in which its tokens were made.
    """

    total: float = 0.0
    during_steps: float = 0.0
    _last: dict[str, tuple[float, float]] = field(default_factory=dict)
    _pending: list[tuple[float, float, float]] = field(default_factory=list)
    _steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))

    def report(self, role: str, time: float, running_total: float) -> None:
        """A worker has sampled `running_total` tokens by `time`; a smaller total than before means it was restarted."""
        last_time, last_total = self._last.get(role, (time, 0.0))
        made = running_total - last_total if running_total >= last_total else running_total
        self._last[role] = (time, running_total)
        if made > 0:
            self.total += made
            self._pending.append((last_time, time, made))
            for started, ended in self._steps:
                if ended > last_time:
                    self._settle(started, ended)

    def begin(self, role: str, time: float, running_total: float) -> None:
        """A worker had sampled so many tokens by then, which are not to be counted here."""
        self._last[role] = (time, running_total)

    def settle_step(self, started: float, ended: float) -> None:
        """A step trained from `started` to `ended`: count what was generated meanwhile."""
        self._settle(started, ended)
        self._steps.append((started, ended))

    def _settle(self, started: float, ended: float) -> None:
        later = []
        for first, last, tokens in self._pending:
            span = max(last - first, 1e-9)
            overlap = max(0.0, min(last, ended) - max(first, started)) / span
            self.during_steps += tokens * min(overlap, 1.0)
            if last > ended:
                begin = max(first, ended)
                later.append((begin, last, tokens * (last - begin) / span))
        self._pending = later


@dataclass(slots=True)
class RunView:
    """The latest of everything.

    Attributes:
        max_steps: that the run is to take.
        train_devices: that train; 0 if it is not known, then nothing is told by device.
        engine_devices: that an engine is split over.
        first_step: the first that ended in this life; 0 before.
        left: when each of the last steps ended, and what was left then of each of the run's limits.
    """

    max_steps: int
    train_devices: int = 0
    engine_devices: int = 1
    step: int = 0
    first_step: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    workers: dict[str, dict[str, float]] = field(default_factory=dict)
    roles: dict[str, dict[str, float]] = field(default_factory=dict)
    heard_at: dict[str, float] = field(default_factory=dict)
    relays: dict[str, dict[str, float]] = field(default_factory=dict)
    system: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    left: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    notices: list[str] = field(default_factory=list)
    restores: list[str] = field(default_factory=list)
    accuracies: dict[int, float] = field(default_factory=dict)
    generation: GenerationMeter = field(default_factory=GenerationMeter)
    trained_tokens: float = 0.0
    step_seconds: float = 0.0
    trainer_wait: str = ""
    _totals: dict[str, Total] = field(default_factory=lambda: defaultdict(Total))
    _generated_at_step: float = 0.0
    _paces: deque[tuple[float, float]] = field(default_factory=deque)

    def continue_from(self, line: Mapping[str, Any]) -> None:
        """What is counted so far goes on from the last step that has a line, whoever wrote it."""
        self.step = int(line["step"])
        for name in (*SUMMED_OVER_WORKERS, *COUNTED_BY_THE_TRAINER):
            self._totals[name].value = float(line.get(name, 0.0))

    def catch_up(self, event: Event) -> None:
        """Take in an event that an earlier observer of this life has counted already."""
        match event.kind:
            case "step":
                self.step = max(self.step, int(event.metrics["train/step"]))
                for name in COUNTED_BY_THE_TRAINER:
                    self._totals[name].remember(event.role, event.metrics.get(name, 0.0))
            case "worker":
                for name in SUMMED_OVER_WORKERS:
                    self._totals[name].remember(event.role, event.metrics.get(name, 0.0))
                self.generation.begin(event.role, event.time, event.metrics.get("engine/generated_tokens", 0.0))
                self.workers[event.role] = event.metrics
                self._hear(event)
            case _:
                self.apply(event)

    def apply(self, event: Event) -> dict[str, float]:
        """Take in one event; returns the metrics of a step completed with what only the observer knows, else nothing."""
        match event.kind:
            case "step":
                return self._apply_step(event)
            case "clock":
                self._hear(event)
            case "worker":
                self._hear(event)
                self.workers[event.role] = event.metrics
                self.generation.report(event.role, event.time, event.metrics.get("engine/generated_tokens", 0.0))
                for name in SUMMED_OVER_WORKERS:
                    self._totals[name].report(event.role, event.metrics.get(name, 0.0))
            case "relay":
                self._hear(event)
                self.relays[event.role] = event.metrics
            case "system":
                self.system = event.metrics
            case "evaluation":
                self.accuracies[int(event.fields["step"])] = event.metrics["eval/accuracy"]
            case "waiting":
                self.trainer_wait = str(event.fields.get("text", ""))
            case "restored":
                self.step, self.left = int(event.fields["step"]), []
                if event.fields.get("lineage", 0):
                    self.restores = [*self.restores[-9:], str(event.fields["text"])]
                    self.notices = [*self.notices[-49:], self.restores[-1]]
            case "retired":
                for known in (self.roles, self.workers, self.relays, self.heard_at):
                    known.pop(str(event.fields.get("role")), None)
            case "notice" | "control" | "alert":
                self.notices = [*self.notices[-49:], f"{event.role}: {event.fields.get('text', '')}"]
        return {}

    def _hear(self, event: Event) -> None:
        self.roles[event.role], self.heard_at[event.role] = event.metrics, event.time

    def _apply_step(self, event: Event) -> dict[str, float]:
        metrics = dict(event.metrics)
        self.step = int(metrics["train/step"])
        self.first_step = self.first_step or self.step
        self.trainer_wait = ""
        self.left = [*self.left[-19:], (event.time, event.fields.get("left", {}))]
        self.generation.settle_step(float(event.fields["train_started"]), float(event.fields["train_ended"]))
        seconds = metrics.get("time/step_seconds", 0.0)
        self.step_seconds += seconds
        self.trained_tokens += metrics.get("train/tokens", 0.0)
        generated = self.generation.total - self._generated_at_step
        self._generated_at_step = self.generation.total
        self._remember_pace(generated, seconds)
        if seconds > 0:
            metrics["throughput/trained_tokens_per_second"] = metrics.get("train/tokens", 0.0) / seconds
            metrics["throughput/generated_tokens_per_second"] = generated / seconds
            if self.train_devices:
                devices = self.train_devices + self.engine_devices * len(self.workers)
                metrics["throughput/tokens_per_second_per_device"] = metrics.get("train/tokens", 0.0) / seconds / devices
        for name in metrics.keys() & set(COUNTED_BY_THE_TRAINER):
            metrics[name] = self._totals[name].report(event.role, metrics[name])
        for name in SUMMED_OVER_WORKERS:
            metrics[name] = self._totals[name].value
        if (seconds_left := self.seconds_left()) is not None:
            metrics["time/left_seconds"] = seconds_left
        metrics |= self._worst_of_roles() | self.system
        if self.heard_at:
            metrics["faults/heartbeat_age_seconds"] = max(0.0, event.time - min(self.heard_at.values()))
        for name, value in metrics.items():
            if name.startswith("staleness/histogram_"):
                self.staleness[int(name.rpartition("_")[2])] += int(value)
        metrics.setdefault("reward/finished_mean", metrics.get("reward/mean", 0.0))
        self.rewards.append(metrics["reward/finished_mean"])
        self.latest = metrics
        return metrics

    def _remember_pace(self, generated: float, seconds: float) -> None:
        self._paces.append((generated, seconds))
        while len(self._paces) > 1 and sum(spent for _, spent in self._paces) - self._paces[0][1] >= PACE_SECONDS:
            self._paces.popleft()

    def generated_per_second(self) -> float | None:
        """Generated tokens a second over the last steps of `PACE_SECONDS` together, or all there were; None before a step.

        Workers report between steps that may be shorter than their reports are apart: one step has 0, the next a burst.
        """
        seconds = sum(spent for _, spent in self._paces)
        return sum(generated for generated, _ in self._paces) / seconds if seconds > 0 else None

    def _worst_of_roles(self) -> dict[str, float]:
        roles = [*self.relays.values(), *self.workers.values()]
        worst = {}
        for names, pick in ((LARGEST, max), (SMALLEST, min)):
            for name in names:
                if values := [role[name] for role in roles if name in role]:
                    worst[name] = pick(values)
        held = [worker.get("worker/version_number", UNKNOWN) for worker in self.workers.values()]
        if known := [number for number in held if number != UNKNOWN]:
            worst["weights/min_replica_version"] = min(known)
        return worst

    def seconds_left(self) -> float | None:
        """Until the first of the run's limits, at the pace of the last steps; None before the second step."""
        if len(self.left) < 2:
            return None
        (began, before), (ended, now) = self.left[0], self.left[-1]
        if ended <= began:  # a clock that was set back, or does not tell them apart
            return None
        paces = {name: (before[name] - amount) / (ended - began) for name, amount in now.items() if name in before}
        return min((max(0.0, now[name]) / pace for name, pace in paces.items() if pace > 0), default=None)
