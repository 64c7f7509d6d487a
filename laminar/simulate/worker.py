"""One replica of the asynchronous systems: claims groups, plays them on its engine, takes new weights by the update mode.

It mirrors `rollout.worker`: admission by the staleness rule, `in_flight.next_limit`, draining in mode `trajectory`. What it
may not do without the others (moves, global broadcasts) is done to it by `laminar.simulate.fleet`.
"""

from collections.abc import Callable

from simpy import Environment

from laminar.policies.in_flight import next_limit
from laminar.policies.repack import ReplicaLoad, expected_remaining
from laminar.simulate.buffer import SimulatedBuffer
from laminar.simulate.cluster import Cluster
from laminar.simulate.engine import SimulatedEngine
from laminar.simulate.requests import Group, Request
from laminar.simulate.system import System
from laminar.simulate.workload import Draws, Workload
from laminar.types import WeightVersion

LOOK_SECONDS = 0.5
"""Least time between two adaptations of the in-flight limit."""


class SimulatedWorker:
    """See the module.

    Args:
        number: of the replica.
        env: the simulation.
        workload, cluster, system: what is simulated.
        buffer: of the run.
        draws: of environment times.
        on_draining: told when the replica begins or ends to drain.

    Attributes:
        version: that its engine holds.
        newest: complete on its machine.
        away: requests of this engine in their environments, in the order in which they went.
        is_alive: whether it generates at all.
        swap_seconds: waits for weights, one a swap, from the moment nothing else held it up.
    """

    def __init__(
        self,
        number: int,
        env: Environment,
        workload: Workload,
        cluster: Cluster,
        system: System,
        buffer: SimulatedBuffer,
        draws: Draws,
        on_draining: Callable[[], None],
    ) -> None:
        self.number, self.name = number, f"{number:05d}"
        self._env, self._workload, self._cluster, self._system = env, workload, cluster, system
        self._buffer, self._draws, self._on_draining = buffer, draws, on_draining
        self.engine = SimulatedEngine(env, cluster.engine, self._end_turn)
        self.version = self.newest = 0
        self.groups: set[Group] = set()
        self.away: dict[Request, None] = {}
        self.held: list[Request] = []
        self.is_alive, self.is_draining, self.is_swapping = True, False, False
        self.num_admitted = 0
        self.swap_seconds: list[float] = []
        self._limit = system.max_in_flight_groups
        self._retracted_before, self._looked_at = 0, 0.0
        self._drain = 0

    # -- work --------------------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Take as many groups as there is room for."""
        if not self.is_alive or self.is_draining or self.is_swapping or self._system.is_lockstep:
            return
        if not self._system.refills and self.groups:
            return
        self._adapt()
        room = self._limit - len(self.groups)
        if room <= 0:
            return
        groups = self._buffer.claim(self.version, room, self._env.now)
        requests = [member for group in groups for member in group.members]
        self.groups.update(groups)
        self.num_admitted += len(requests)
        self.begin(requests)

    def begin(self, requests: list[Request]) -> None:
        """Let the engine sample these with its present weights."""
        for request in requests:
            request.note_version(self.version)
        if requests:
            self.engine.add(requests)

    def _end_turn(self, request: Request) -> None:
        if request.group.is_gone:
            self._close(request)
        elif request.turn + 1 < len(request.turn_ends):
            self.away[request] = None
            timer = self._env.timeout(self._draws.turn_seconds())
            assert timer.callbacks is not None
            timer.callbacks.append(lambda _: self._come_back(request))
        else:
            self._close(request)
        self._look_at_swap()

    def _come_back(self, request: Request) -> None:
        if request not in self.away:
            return
        del self.away[request]
        if request.group.is_gone:
            self._close(request)
            self._look_at_swap()
            return
        request.turn += 1
        request.context += self._workload.observation_tokens
        request.uncached = float(self._workload.observation_tokens)
        if self._system.weight_update == "turn" and self.is_draining:
            self.held.append(request)
        else:
            self.begin([request])

    def _close(self, request: Request) -> None:
        """A trajectory of ours has ended; its group may make room for another."""
        if self._buffer.submit(request, self._env.now):
            self.groups.discard(request.group)
            self.claim()

    def drop(self, group: Group) -> None:
        """Abort an evicted group."""
        here = [member for member in self.engine.requests if member.group is group]
        if here:
            self.engine.take_out(here)
        self.away = {request: None for request in self.away if request.group is not group}
        self.held = [request for request in self.held if request.group is not group]
        self.groups.discard(group)
        self._look_at_swap()
        self.claim()

    def _adapt(self) -> None:
        if not self._system.adapt_in_flight or self._env.now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at, engine = self._env.now, self.engine
        retracted, self._retracted_before = engine.num_retracted - self._retracted_before, engine.num_retracted
        self._limit = next_limit(
            self._limit,
            ceiling=self._system.max_in_flight_groups,
            in_flight=len(self.groups),
            kv_share=engine.context / self._cluster.engine.capacity_tokens,
            num_waiting=len(engine.waiting),
            num_retracted=retracted,
        )

    # -- weights -----------------------------------------------------------------------------------------------------------

    def arrive(self, version: int) -> None:
        """A version is complete on this machine."""
        self.newest = max(self.newest, version)
        if not self.is_alive or self.is_swapping or self.newest <= self.version:
            return
        if self._system.weight_update == "in_flight":
            self.swap()
            return
        if not self.is_draining:
            self.is_draining = True
            self._drain += 1
            self._hold(self._drain)
            self._look_at_swap()
            self._on_draining()

    def _hold(self, drain: int) -> None:
        """After `max_hold_seconds` of draining the swap happens in flight."""

        def give_up(_: object) -> None:
            if self.is_draining and self._drain == drain:
                self.swap()

        timer = self._env.timeout(self._system.max_hold_seconds)
        assert timer.callbacks is not None
        timer.callbacks.append(give_up)

    def _look_at_swap(self) -> None:
        """Swap once nothing is in the way."""
        if not self.is_draining or self.is_swapping or self.engine.num_open:
            return
        if self._system.weight_update == "turn" or not self.away:
            self.swap()

    def swap(self) -> None:
        """Stand still and take the newest weights of this machine."""
        self.is_draining, self.is_swapping = False, True
        version, seconds = self.newest, self._cluster.transfers.load_seconds
        self.swap_seconds.append(seconds)
        self.engine.pause()
        timer = self._env.timeout(seconds)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self._swapped(version))

    def _swapped(self, version: int) -> None:
        if not self.is_alive:
            return
        self.set_version(version)
        self.is_swapping = False
        self.engine.resume(recompute=not self._system.keeps_cache)
        held, self.held = self.held, []
        self.begin(held)
        self._on_draining()
        self.claim()
        self.arrive(self.newest)

    def set_version(self, version: int) -> None:
        """From here on the engine samples with other weights."""
        for request in self.engine.requests:
            request.note_version(version)
        self.version = version

    # -- moves -------------------------------------------------------------------------------------------------------------

    @property
    def is_finishing(self) -> bool:
        """Whether it takes no new groups before all it has have ended, so that moving them away makes it free."""
        return not self.is_swapping and (self.is_draining or (not self._system.refills and bool(self.groups)))

    def load(self) -> ReplicaLoad:
        """How full it is, as the real worker tells; how much remains is told only while it finishes (nobody else asks)."""
        engine = self.engine
        engine.settle()
        outside = [*engine.waiting, *self.away]
        return ReplicaLoad(
            self.name,
            WeightVersion(0, self.version),
            round(engine.context + sum(request.context for request in outside)),
            self._cluster.engine.capacity_tokens,
            engine.num_open + len(self.away),
            len(engine.waiting),
            self.num_admitted,
            self._expected_remaining() if self.is_finishing and not engine.waiting else 0,
        )

    def _expected_remaining(self) -> int:
        """Of the longest-lived trajectory; the expectation rises up to half the budget and falls from there."""
        longest = self._workload.max_new_tokens
        sampled = [*self.engine.sampled_tokens(), *(request.sampled for request in self.away)]
        below = max((tokens for tokens in sampled if tokens <= longest / 2), default=None)
        above = min((tokens for tokens in sampled if tokens > longest / 2), default=None)
        nearest = [round(tokens) for tokens in (below, above) if tokens is not None]
        return max((expected_remaining(tokens, longest - tokens) for tokens in nearest), default=0)

    def hand_over(self, destination: "SimulatedWorker") -> int:
        """Everything that is open here goes on over there; returns how many trajectories that were.

        Those in their environments return there, and their context is computed there then.
        """
        requests, away, held = self.engine.requests, self.away, self.held
        self.engine.take_out(requests)
        self.away, self.held = {}, []
        destination.groups |= self.groups
        self.groups = set()
        for request in (*requests, *held):
            request.uncached = request.context
        destination.begin([*requests, *held])
        for request in away:
            destination.adopt_away(request, self._draws.turn_seconds())
        self._look_at_swap()
        self.claim()
        return len(requests) + len(away) + len(held)

    def adopt_away(self, request: Request, seconds: float) -> None:
        """A trajectory whose environment is busy for so many seconds more will return here."""
        self.away[request] = None
        timer = self._env.timeout(seconds)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self._come_back(request))
