"""Which replicas of an old version hand their last trajectories over, so that they take the new weights at once.

Laminar, section 4.2 (best-fit consolidation of long-tail generations), with what the published algorithm leaves open:
a destination is never emptied in the same plan; a replica stays idle while its last trajectory's cache grows (the paper asks
that cache use fell since the last look, which a lone straggler never satisfies); room for growth is kept; a move must pay.

Invariants: versions never mix; no plan where nothing is gained (only replicas that wait for a newer version are emptied, and
an empty one is neither source nor destination); a destination holds its bounds also after the planned growth.

A fuller cache makes every step slower, since keys and values are read in each, so what a replica's release gains, the
longest-lived trajectories pay. `crowded_tokens` bounds that: the more they are expected to sample, the emptier their cache.

Unit of cost: one decode step of an empty engine, which reads all weights once. By the roofline, `max_requests` rows cost as
much arithmetic as that reading, so a step with n requests takes 1 + n / max_requests, and computing c tokens of context
c / max_requests. Pure: it knows neither clocks nor engines.
"""

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from laminar.errors import InvariantError
from laminar.types import WeightVersion


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How full one replica is.

    Attributes:
        context_tokens: prompt and sampled tokens of its open trajectories, guests included.
        capacity_tokens: the most its key-value cache holds.
        num_open: its open trajectories, guests included.
        num_waiting: requests that the engine has not begun.
        num_admitted: trajectories of its own that it began so far; a rise is new work.
        remaining_tokens: how many more the longest-lived of its trajectories is expected to sample.
    """

    replica: str
    version: WeightVersion
    context_tokens: int
    capacity_tokens: int
    num_open: int
    num_waiting: int
    num_admitted: int
    remaining_tokens: int

    def __post_init__(self) -> None:
        if self.capacity_tokens < 1:
            raise InvariantError(f"replica {self.replica}: capacity_tokens {self.capacity_tokens} must be 1 or more")


@dataclass(frozen=True, slots=True)
class RepackLimits:
    """What a plan must keep to.

    Attributes:
        kv_high: share of the cache below which a replica with nothing waiting counts as idle.
        kv_limit: share of a destination's cache that may be used once everything has grown.
        headroom_tokens: growth that is planned for each trajectory, in tokens.
        max_requests: most trajectories on a destination: the batch up to which a step is bound by reading weights.
        crowded_tokens: where more than so many remain, `kv_limit` shrinks in proportion; None: it does not.
    """

    kv_high: float
    kv_limit: float
    headroom_tokens: int
    max_requests: int
    crowded_tokens: int | None = None

    def share_limit(self, remaining_tokens: int) -> float:
        """Share of a cache that may be used by trajectories of which the longest-lived has so many tokens ahead."""
        if self.crowded_tokens is None or remaining_tokens <= self.crowded_tokens:
            return self.kv_limit
        return self.kv_limit * self.crowded_tokens / remaining_tokens


@dataclass(frozen=True, slots=True)
class Move:
    """All open trajectories of the source go to the destination."""

    source: str
    destination: str


def request_bound(flops_per_byte: float, bytes_per_parameter: float) -> int:
    """The roofline's `max_requests`: 2 · n operations for each parameter take as long as reading it at n = this.

    Args:
        flops_per_byte: arithmetic speed over memory bandwidth, such as 989e12 / 3.35e12 = 295 for an H100 in bfloat16.
        bytes_per_parameter: 2 for bfloat16.
    """
    return max(1, int(flops_per_byte * bytes_per_parameter / 2))


def expected_remaining(sampled_tokens: int, budget_tokens: int) -> int:
    """How many tokens a trajectory is expected to sample still: as many as it has, for its length is long-tailed.

    Args:
        sampled_tokens: so far.
        budget_tokens: the most that it may still sample.
    """
    return min(budget_tokens, max(sampled_tokens, 1))


def latch_idle(latched: Mapping[str, int], loads: Iterable[ReplicaLoad], kv_high: float) -> dict[str, int]:
    """Which replicas are idle: nothing waits and use fell below `kv_high`; they stay so until new work is admitted.

    Args:
        latched: what the last call returned.
        loads: how full the replicas are now.
        kv_high: share of the cache.

    Returns:
        Name of each idle replica, and its `num_admitted` when it became idle.
    """
    return {
        load.replica: load.num_admitted
        for load in loads
        if latched.get(load.replica) == load.num_admitted
        or (load.num_waiting == 0 and load.context_tokens < kv_high * load.capacity_tokens)
    }


def plan_repack(
    loads: Sequence[ReplicaLoad], idle: Collection[str], newest: WeightVersion, limits: RepackLimits
) -> tuple[Move, ...]:
    """Which replicas to empty, and into which; each source and each destination by name.

    Args:
        loads: all replicas that can be talked to, each once.
        idle: those that `latch_idle` names.
        newest: the version that a released replica would take.
        limits: what the plan must keep to.
    """
    old = [load for load in loads if load.version < newest and load.num_open and not load.num_waiting]
    old.sort(key=lambda load: (load.version, share_of(load, 0), load.replica))
    moves: list[Move] = []
    for _, group in groupby(old, key=lambda load: load.version):
        same = list(group)
        moves += _Fleet(same, limits).consolidate([load for load in same if load.replica in idle])
    return tuple(moves)


def fits(source: ReplicaLoad, destination: ReplicaLoad, limits: RepackLimits) -> bool:
    """Whether the destination holds its bounds with the source's trajectories, also after the planned growth."""
    num_open = source.num_open + destination.num_open
    grown = source.context_tokens + destination.context_tokens + limits.headroom_tokens * num_open
    limit = limits.share_limit(max(source.remaining_tokens, destination.remaining_tokens))
    return num_open <= limits.max_requests and grown <= limit * destination.capacity_tokens


def pays(source: ReplicaLoad, limits: RepackLimits) -> bool:
    """Whether emptying a replica frees more than it costs.

    Freed: the steps its longest trajectory still needs, r · (1 + n / max_requests). Cost: the destination computes the
    context anew, c / max_requests, and its steps carry n more requests, r · n / max_requests, which cancels on both sides.
    """
    return source.remaining_tokens * limits.max_requests > source.context_tokens


def merged(source: ReplicaLoad, destination: ReplicaLoad) -> ReplicaLoad:
    """The destination's load once it has taken the source's trajectories in."""
    return replace(
        destination,
        context_tokens=destination.context_tokens + source.context_tokens,
        num_open=destination.num_open + source.num_open,
        remaining_tokens=max(destination.remaining_tokens, source.remaining_tokens),
    )


def share_of(load: ReplicaLoad, headroom_tokens: int) -> float:
    """Share of its cache that a replica needs once each of its trajectories has grown by so many tokens."""
    return (load.context_tokens + headroom_tokens * load.num_open) / load.capacity_tokens


class _Fleet:
    """Replicas of one version, ordered by how full they are, while a plan is made."""

    def __init__(self, loads: Sequence[ReplicaLoad], limits: RepackLimits) -> None:
        self._limits = limits
        self._load = {load.replica: load for load in loads}
        self._largest = max(load.capacity_tokens for load in loads)
        self._smallest = replace(
            loads[0],
            context_tokens=min(load.context_tokens for load in loads),
            num_open=min(load.num_open for load in loads),
            remaining_tokens=0,
        )
        self._order: list[tuple[float, str]] = []
        for load in loads:
            self._insert(load)

    def consolidate(self, sources: Sequence[ReplicaLoad]) -> list[Move]:
        """Empty the sources, given in ascending order, as far as that fits and pays."""
        moves: list[Move] = []
        taken: set[str] = set()
        for source in sources:
            if source.replica in taken or not pays(source, self._limits):
                continue
            destination = self._fullest_that_fits(source)
            if destination is not None:
                self._move(source, destination)
                taken.add(destination.replica)
                moves.append(Move(source.replica, destination.replica))
        return moves

    def _fullest_that_fits(self, source: ReplicaLoad) -> ReplicaLoad | None:
        room = self._limits.share_limit(source.remaining_tokens) - share_of(source, self._limits.headroom_tokens) * (
            source.capacity_tokens / self._largest
        )
        for position in reversed(range(bisect_right(self._order, (room + 1e-9, "\U0010ffff")))):
            destination = self._load[self._order[position][1]]
            if destination.replica != source.replica and fits(source, destination, self._limits):
                return destination
        return None

    def _move(self, source: ReplicaLoad, destination: ReplicaLoad) -> None:
        for load in (source, destination):
            key = self._key(load)
            position = bisect_right(self._order, key) - 1
            if position >= 0 and self._order[position] == key:
                del self._order[position]
        del self._load[source.replica]
        self._load[destination.replica] = merged(source, destination)
        self._insert(self._load[destination.replica])

    def _insert(self, load: ReplicaLoad) -> None:
        """Offer a replica as a destination, unless no source could ever fit."""
        if fits(self._smallest, load, self._limits):
            insort(self._order, self._key(load))

    def _key(self, load: ReplicaLoad) -> tuple[float, str]:
        return share_of(load, self._limits.headroom_tokens), load.replica
