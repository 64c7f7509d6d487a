"""All replicas of an asynchronous system, and what is done to them together: versions on their way, repack, failures.

Plans are those of `laminar.policies.repack`, made as `rollout.manager` makes them: every few seconds, and when other
replicas drain than before.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from simpy import Environment, Event

from laminar.policies.repack import latch_idle, plan_repack
from laminar.simulate.buffer import SimulatedBuffer
from laminar.simulate.cluster import Cluster, Failure
from laminar.simulate.requests import Group, Request
from laminar.simulate.system import Repack, System
from laminar.simulate.worker import SimulatedWorker
from laminar.simulate.workload import Draws, Workload
from laminar.types import WeightVersion


@dataclass(slots=True)
class Moves:
    """What repack came to."""

    released_replicas: int = 0
    moved_trajectories: int = 0


@dataclass(slots=True)
class Fleet:
    """See the module.

    Attributes:
        workers: by number.
        moves: by repack.
        orphans: trajectories of dead replicas that nobody may go on with yet.
    """

    env: Environment
    cluster: Cluster
    system: System
    buffer: SimulatedBuffer
    workers: list[SimulatedWorker] = field(default_factory=list)
    moves: Moves = field(default_factory=Moves)
    orphans: list[Request] = field(default_factory=list)
    _latched: dict[str, int] = field(default_factory=dict)
    _drained_then: frozenset[str] = frozenset()
    _plan_is_due: bool = False

    def start(self, workload: Workload, draws: Draws) -> None:
        """Begin to generate."""
        for number in range(self.cluster.num_replicas):
            self.workers.append(
                SimulatedWorker(
                    number, self.env, workload, self.cluster, self.system, self.buffer, draws, self._look_at_draining
                )
            )
        if self.system.repack and self.system.kind == "laminar" and self.system.weight_update == "trajectory":
            self.env.process(self._repack(self.system.repack))
        for failure in self.cluster.failures:
            self.env.process(self._fail(failure))
        self.claim_all()

    def claim_all(self) -> None:
        """Everybody with room asks for groups; who has least goes first, so that a shortage is shared."""
        self._place(self.orphans)
        for worker in sorted(self.workers, key=lambda worker: len(worker.groups)):
            worker.claim()

    def announce(self, version: int) -> None:
        """A version is with the master relay: it arrives machine by machine."""
        transfers, engine = self.cluster.transfers, self.cluster.engine
        for worker in self.workers:
            machine = worker.number * engine.num_gpus // transfers.gpus_per_machine
            self.env.process(self._deliver(worker, version, transfers.arrival_seconds(machine)))

    def _deliver(self, worker: SimulatedWorker, version: int, seconds: float) -> Generator[Event, None, None]:
        yield self.env.timeout(seconds)
        worker.arrive(version)

    def broadcast(self, version: int) -> Generator[Event, None, None]:
        """Everybody stands still for a global broadcast; what runs is computed anew under the new weights."""
        seconds = self.cluster.transfers.global_sync_seconds(self.cluster.num_gpus)
        living = [worker for worker in self.workers if worker.is_alive]
        for worker in living:
            worker.engine.pause()
        yield self.env.timeout(seconds)
        for worker in living:
            worker.newest = version
            worker.swap_seconds.append(seconds)
            worker.set_version(version)
            worker.engine.resume(recompute=not self.system.keeps_cache)

    def drop(self, groups: Iterable[Group]) -> None:
        """Abort evicted groups wherever they are."""
        for group in groups:
            self.orphans = [request for request in self.orphans if request.group is not group]
            for worker in self.workers:
                if group in worker.groups:
                    worker.drop(group)

    # -- repack ------------------------------------------------------------------------------------------------------------

    def _look_at_draining(self) -> None:
        """Plan at once if other replicas drain than at the last plan (after all that happens at this moment)."""
        if self.system.repack is None or self._plan_is_due:
            return
        self._plan_is_due = True
        timer = self.env.timeout(0)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self._plan_now())

    def _plan_now(self) -> None:
        self._plan_is_due = False
        draining = frozenset(worker.name for worker in self.workers if worker.is_draining)
        if self.system.repack is not None and draining != self._drained_then:
            self._consolidate(self.system.repack)

    def _repack(self, repack: Repack) -> Generator[Event, None, None]:
        while True:
            yield self.env.timeout(repack.interval_seconds)
            self._consolidate(repack)

    def _consolidate(self, repack: Repack) -> None:
        living = [worker for worker in self.workers if worker.is_alive]
        finishing = {worker.name: worker for worker in living if worker.is_finishing}
        self._drained_then = frozenset(worker.name for worker in finishing.values() if worker.is_draining)
        loads = [worker.load() for worker in living]
        self._latched = latch_idle(self._latched, loads, repack.limits.kv_high)
        # A released replica takes the newest weights, or without `refills` at least new groups: then all are behind.
        newest = max((worker.newest for worker in living), default=0) + (not self.system.refills)
        candidates = [load for load in loads if load.replica in finishing]
        for move in plan_repack(candidates, self._latched, WeightVersion(0, newest), repack.limits):
            moved = finishing[move.source].hand_over(finishing[move.destination])
            self.moves.moved_trajectories += moved
            self.moves.released_replicas += 1

    # -- failures ----------------------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> Generator[Event, None, None]:
        yield self.env.timeout(failure.at_seconds)
        lost: list[Request] = []
        for number in failure.replicas:
            worker = self.workers[number]
            worker.is_alive = worker.is_draining = worker.is_swapping = False
            requests = [*worker.engine.requests, *worker.away, *worker.held]
            worker.engine.take_out(worker.engine.requests)
            worker.away, worker.held, worker.groups = {}, [], set()
            lost += requests
        self.orphans += lost
        self._place(self.orphans)
        yield self.env.timeout(failure.seconds)
        for number in failure.replicas:
            worker = self.workers[number]
            worker.is_alive, worker.version = True, worker.newest
            worker.engine.resume()
            worker.claim()

    def _place(self, requests: list[Request]) -> None:
        """Let others go on with lost trajectories, from the tokens that were put by, where the staleness rule lets them."""
        self.orphans = []
        for request in requests:
            if request.group.is_gone:
                continue
            hosts = [w for w in self.workers if w.is_alive and not w.is_swapping]
            hosts = [w for w in hosts if self.buffer.may_readmit(request.group, w.version)]
            same = [w for w in hosts if w.version == request.oldest] or [w for w in hosts if not w.is_draining]
            if not same:
                self.orphans.append(request)
                continue
            host = min(same, key=lambda worker: worker.engine.context + len(worker.engine.waiting))
            request.uncached = request.context
            host.groups.add(request.group)
            host.begin([request])
