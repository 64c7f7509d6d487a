"""Run a simulation: `simulate(workload, cluster, system, seed=0, num_steps=10) -> Outcome`."""

import math
from collections.abc import Callable, Generator
from dataclasses import replace

import numpy as np
from simpy import Environment, Event

from laminar.errors import ConfigError
from laminar.simulate.asynchronous import AsynchronousTrainer
from laminar.simulate.buffer import SimulatedBuffer
from laminar.simulate.cluster import Cluster
from laminar.simulate.fleet import Fleet
from laminar.simulate.lockstep import LockstepRun
from laminar.simulate.recorder import CURVE_SECONDS, Outcome, Recorder
from laminar.simulate.requests import Group
from laminar.simulate.system import System
from laminar.simulate.workload import Draws, Workload


def simulate(
    workload: Workload,
    cluster: Cluster,
    system: System,
    *,
    seed: int = 0,
    num_steps: int = 10,
    warm_steps: int = 3,
    curve: bool = False,
) -> Outcome:
    """Play a run.

    Args:
        workload: what is generated and trained.
        cluster: on what. For `synchronous` trainer and replicas are the same GPUs.
        system: by whose rules.
        seed: of lengths and environment times; the same seed gives the same outcome, to the last digit.
        num_steps: in all.
        warm_steps: the first ones, which are not measured.
        curve: record generated tokens over time.

    Raises:
        ConfigError: if the numbers cannot work.
        StandstillError: no step ended for `system.no_progress_seconds`.
    """
    if not 0 <= warm_steps < num_steps:
        raise ConfigError(f"warm_steps is {warm_steps}; it must be below num_steps = {num_steps}")
    if system.is_lockstep:
        system = replace(system, max_staleness=None, max_outstanding_groups=None, repack=None)
    env = Environment()
    notes: list[Callable[[Group], None]] = []
    buffer = SimulatedBuffer(workload, system, Draws(workload, seed), lambda group: notes[0](group))
    fleet = Fleet(env, cluster, system, buffer)
    fleet.start(workload, Draws(workload, seed))
    engines = [worker.engine for worker in fleet.workers]
    recorder = Recorder(engines, warm_steps, lambda: float(env.now))
    kind = LockstepRun if system.is_lockstep else AsynchronousTrainer
    trainer = kind(fleet, workload.prompts_per_step, recorder)
    notes.append(trainer.note)
    if curve:
        env.process(_draw(env, recorder))
    if system.no_progress_seconds < math.inf:
        env.process(_watch(env, recorder, system))
    env.run(until=env.process(trainer.run(num_steps)))
    return _outcome(recorder, buffer, fleet)


class StandstillError(ConfigError):
    """A run with these settings would be stopped, since no step of it ends for too long."""


def _watch(env: Environment, recorder: Recorder, system: System) -> Generator[Event, None, None]:
    while (left := recorder.stepped_at + system.no_progress_seconds - env.now) > 0:
        yield env.timeout(left)
    bound = "unbounded" if system.max_staleness is None else system.max_staleness
    raise StandstillError(
        f"simulated, no step ends for `run.no_progress_seconds` = {system.no_progress_seconds:g}, so the run would stop: a "
        f"step takes longer, or answers outlast `staleness.max_wait_seconds` = {system.max_wait_seconds:g} and are evicted "
        f"over and over; raise these, or `staleness.max_staleness` = {bound}"
    )


def _draw(env: Environment, recorder: Recorder) -> Generator[Event, None, None]:
    while True:
        recorder.point()
        yield env.timeout(CURVE_SECONDS)


def _outcome(recorder: Recorder, buffer: SimulatedBuffer, fleet: Fleet) -> Outcome:
    tally, generated = buffer.tally, sum(worker.engine.generated for worker in fleet.workers)
    swaps = [seconds for worker in fleet.workers for seconds in worker.swap_seconds]
    return recorder.outcome(
        wasted_share=tally.evicted_tokens / max(generated, 1.0),
        swap_mean_seconds=float(np.mean(swaps)) if swaps else 0.0,
        released_replicas=fleet.moves.released_replicas,
        moved_trajectories=fleet.moves.moved_trajectories,
        admitted=tally.admitted,
        trained=tally.trained,
        evicted=tally.evicted,
        open=sum(len(group.members) for group in buffer.groups.values()),
    )
