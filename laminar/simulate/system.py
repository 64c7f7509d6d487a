"""The systems that are compared, as values: who waits for whom.

| `kind` | generation and training | weights |
|---|---|---|
| `synchronous` | take turns on all GPUs (verl) | a batch is trained on what sampled it |
| `one_step` | side by side, a batch apart | all wait at each step's end for a global broadcast |
| `stream` | as `one_step`, but mini-batches are trained as soon as they are there | the same |
| `partial` | asynchronous; a global broadcast stops all, running answers are computed anew (AReaL) | mixed within answers |
| `laminar` | asynchronous, each replica by itself | by `weight_update` |
"""

import math
from dataclasses import dataclass
from typing import Literal

from laminar.errors import ConfigError
from laminar.policies.repack import RepackLimits
from laminar.policies.samplers import Sampler, fifo

Kind = Literal["synchronous", "one_step", "stream", "partial", "laminar"]


@dataclass(frozen=True, slots=True)
class Repack:
    """How replicas are emptied; see `[rollout.repack]`.

    Attributes:
        limits: what plans must keep to.
        interval_seconds: between plans; one is made when a version arrives, too.
    """

    limits: RepackLimits
    interval_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class System:
    """One system.

    Attributes:
        kind: see the module.
        weight_update: of `laminar`: when a replica takes new weights.
        repack: of `laminar` in mode `trajectory`; None: off.
        max_staleness: K; None: unbounded. Of `laminar`, and of `partial`, where it acts in admission alone: nobody is due.
        policy: what is done about due groups.
        over_provision: groups begun for a step over those it needs: what a batch has overtaken is let go.
        max_wait_seconds: longest wait for due groups.
        no_progress_seconds: the run ends, with an error, when no step ends for so long.
        max_hold_seconds: longest time that open trajectories may hold a swap back.
        max_in_flight_groups: of one replica.
        adapt_in_flight: fewer while the cache is under pressure (`laminar.policies.in_flight`).
        max_outstanding_groups: the buffer's capacity; None: unbounded.
        sampler: order of ready groups.
        keeps_cache: an in-flight swap keeps the running requests' cache (`in_place`) instead of computing it anew.
        syncs_per_step: of `partial`: global broadcasts in a step.
        refills: of `laminar`: a replica takes new groups whenever one has ended; if not, only when all have (the paper's).
    """

    kind: Kind = "laminar"
    weight_update: Literal["trajectory", "turn", "in_flight"] = "trajectory"
    repack: Repack | None = None
    max_staleness: int | None = 1
    policy: Literal["wait", "drop", "mask"] = "wait"
    over_provision: float = 1.0
    max_wait_seconds: float = 600.0
    no_progress_seconds: float = math.inf
    max_hold_seconds: float = 300.0
    max_in_flight_groups: int = 64
    adapt_in_flight: bool = False
    max_outstanding_groups: int | None = None
    sampler: Sampler = fifo
    keeps_cache: bool = False
    syncs_per_step: int = 1
    refills: bool = True

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigError(f"max_staleness is {self.max_staleness}; it must be 0 or more, or None for unbounded")
        if self.max_in_flight_groups < 1:
            raise ConfigError(f"max_in_flight_groups is {self.max_in_flight_groups}; it must be 1 or more")

    @property
    def is_lockstep(self) -> bool:
        """Whether replicas play one batch together and wait for its last trajectory."""
        return self.kind in ("synchronous", "one_step", "stream")
