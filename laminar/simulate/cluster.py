"""The machines: how fast replicas decode, what the trainer takes, what weights cost on their way, what fails.

Every number is physical (seconds, bytes, tokens); `README.md` says where each comes from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from laminar.errors import ConfigError
from laminar.policies.chain import best_chunk_bytes, broadcast_seconds
from laminar.simulate.timings import StepTimes


@dataclass(frozen=True, slots=True)
class Engine:
    """One replica.

    Attributes:
        times: of a decode step.
        num_gpus: over which a replica is split.
        capacity_tokens: that its key-value cache holds.
        max_running: requests decoded at once.
        prefill_tokens_per_second: context computed in a second; decoding stands still meanwhile.
        overhead_seconds: that a step takes on top of `times`, whatever the batch: what the host does between steps.
        request_overhead_seconds: the same, for every request of the batch.
        step_costs: for each number of requests up to `max_running`, seconds of a step without context, and for each token
            of it; follows from the others, once for all replicas.
    """

    times: StepTimes
    num_gpus: int
    capacity_tokens: int
    max_running: int
    prefill_tokens_per_second: float = 30_000.0
    overhead_seconds: float = 0.0
    request_overhead_seconds: float = 0.0
    step_costs: tuple[list[float], list[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_gpus", "capacity_tokens", "max_running", "prefill_tokens_per_second"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"engine: {name} is {getattr(self, name)}; it must be above 0")
        object.__setattr__(self, "step_costs", self._step_costs())

    def _step_costs(self) -> tuple[list[float], list[float]]:
        alone = self.times.step_seconds(1, 0)
        fixed = [alone + self.overhead_seconds + n * self.request_overhead_seconds for n in range(self.max_running + 1)]
        reference = self.times.context_tokens
        by_token = [0.0]
        for n in range(1, self.max_running + 1):
            tokens = n * reference
            by_token.append((self.times.step_seconds(n, tokens) - alone) / tokens)
        return fixed, by_token

    def step_seconds(self, num_requests: float, context_tokens: float) -> float:
        """Seconds in which each of so many requests gets one token; their contexts sum up to `context_tokens`."""
        decode = self.times.step_seconds(num_requests, context_tokens)
        return decode + self.overhead_seconds + num_requests * self.request_overhead_seconds


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer.

    Attributes:
        num_gpus: that train.
        tokens_per_second: that one of them trains, prompts included, all passes of a step together.
        mini_batches: optimizer updates of a step.
        mini_batch_seconds: what each costs besides its tokens: optimizer, collectives, uneven ranks.
        step_seconds: if given, the steps take these, one after another, from the first again at the end.
    """

    num_gpus: int
    tokens_per_second: float
    mini_batches: int = 1
    mini_batch_seconds: float = 0.0
    step_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.tokens_per_second <= 0:
            raise ConfigError(f"trainer: {self.num_gpus} GPUs of {self.tokens_per_second} tokens/s; both must be above 0")

    def seconds(self, tokens: float, step: int, share: float = 1.0) -> float:
        """What `share` of step `step`, with so many tokens, takes."""
        if self.step_seconds:
            return self.step_seconds[step % len(self.step_seconds)] * share
        return tokens / (self.tokens_per_second * self.num_gpus) + share * self.mini_batches * self.mini_batch_seconds


@dataclass(frozen=True, slots=True)
class Transfers:
    """What weights cost on their way.

    Attributes:
        model_bytes: of one version.
        publish_bytes_per_second: at which the trainer copies a version to the master relay, standing still.
        load_bytes_per_second: at which a replica takes a version from its own machine, standing still.
        hop_bytes_per_second: from one relay to the next.
        hop_start_seconds: what a piece costs a hop besides its bytes.
        gpus_per_machine: one relay a machine.
        sync_bytes_per_second: of a global broadcast to all GPUs, to the first machines.
        sync_level_share: by how much every doubling of the machines beyond four slows it, as a share.
        switch_bytes_per_second: of a version, at which GPUs that do both turn from training to generating and back:
            parameters and optimizer go out to the host and come back, weights change their layout. None: a replica's stall.
    """

    model_bytes: float = 0.0
    publish_bytes_per_second: float = 100e9
    load_bytes_per_second: float = 100e9
    hop_bytes_per_second: float = 200e9
    hop_start_seconds: float = 1e-3
    gpus_per_machine: int = 8
    sync_bytes_per_second: float = 80e9
    sync_level_share: float = 0.05
    switch_bytes_per_second: float | None = None

    @property
    def publish_seconds(self) -> float:
        """The trainer's stall."""
        return self.model_bytes / self.publish_bytes_per_second

    @property
    def switch_seconds(self) -> float:
        """What a step of GPUs that do both loses between its phases."""
        return self.model_bytes / self.switch_bytes_per_second if self.switch_bytes_per_second else self.load_seconds

    @property
    def load_seconds(self) -> float:
        """A replica's stall."""
        return self.model_bytes / self.load_bytes_per_second

    def arrival_seconds(self, machine: int) -> float:
        """From the end of the publish until machine `machine` (from 0, in the chain's order) has everything."""
        if not self.model_bytes:
            return 0.0
        num_machines, file_bytes = machine + 2, int(self.model_bytes)
        cost = {"seconds_per_byte": 1 / self.hop_bytes_per_second, "start_seconds": self.hop_start_seconds}
        chunk = best_chunk_bytes(num_machines=num_machines, file_bytes=file_bytes, **cost)
        num_chunks = max(1, -(-file_bytes // chunk))
        return broadcast_seconds(num_machines=num_machines, num_chunks=num_chunks, file_bytes=file_bytes, **cost)

    def global_sync_seconds(self, num_gpus: int) -> float:
        """A broadcast to so many GPUs for which everybody stands still."""
        levels = max(0.0, math.log2(max(1.0, num_gpus / self.gpus_per_machine / 4)))
        return self.model_bytes / self.sync_bytes_per_second * (1 + self.sync_level_share * levels)


@dataclass(frozen=True, slots=True)
class Failure:
    """Replicas die together (a machine) and come back.

    Attributes:
        at_seconds: when, in simulated time.
        replicas: numbers of those that die.
        seconds: until they generate again, with the newest weights.
    """

    at_seconds: float
    replicas: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """All machines.

    Attributes:
        engine: of every replica.
        num_replicas: how many generate.
        trainer: what trains.
        transfers: how weights travel.
        failures: what goes wrong, and when.
    """

    engine: Engine
    num_replicas: int
    trainer: Trainer
    transfers: Transfers = field(default_factory=Transfers)
    failures: Sequence[Failure] = ()

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas is {self.num_replicas}; it must be 1 or more")
        for failure in self.failures:
            if any(not 0 <= index < self.num_replicas for index in failure.replicas):
                raise ConfigError(f"a failure names replicas {failure.replicas}, but there are {self.num_replicas}")

    @property
    def num_gpus(self) -> int:
        """Of trainer and replicas together, if they share none."""
        return self.trainer.num_gpus + self.num_replicas * self.engine.num_gpus
