"""The staleness rule: who may be admitted, which batch is legal, whom the trainer waits for (DESIGN section 5).

Words: K = `max_staleness`, B = `prompts_per_step`, t = published number, e = number of the engine that samples, n = number
that a batch is trained on. A group admitted under K with oldest number o is trained on o + K at the latest, its *deadline*.

Why the bound holds: a group is admitted only if all outstanding groups, itself included, fit into the batches up to its own
deadline, so at most (d + 1) * B untaken groups ever have a deadline <= n + d; a batch may then be drawn in any order that
leaves at most d * B of them, for every d. `README.md` has the proof. Under policy `mask` groups have no deadline.

Nothing here does I/O, knows the time, or keeps state: the caller hands in headers and numbers and acts on the answer.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from laminar.errors import ConfigError, InvariantError
from laminar.policies.samplers import Sampler, fifo
from laminar.types import GroupHeader, GroupState

UNLIMITED = sys.maxsize
"""Free slots, or batches until the deadline, where nothing is bounded."""


@dataclass(frozen=True, slots=True)
class StalenessSplit:
    """Staleness by where it arose, in weight versions: while sampling, and in the queue; `total` is their sum."""

    in_flight: int
    in_queue: int

    @property
    def total(self) -> int:
        """Version trained on minus oldest version."""
        return self.in_flight + self.in_queue


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What the trainer may do now.

    Attributes:
        chosen: ids of a legal batch, in training order; empty if there is none yet.
        due: groups in flight that prevent a legal batch, earliest deadline first.
        missing: how many ready groups a batch lacks.
        over_age: ids of untaken groups whose deadline has passed, earliest deadline first: the caller evicts them.
            Empty for ever under policy `wait`.
    """

    chosen: tuple[str, ...]
    due: tuple[GroupHeader, ...]
    missing: int
    over_age: tuple[str, ...]

    @property
    def is_held_by_bound(self) -> bool:
        """Whether enough groups are ready and only due ones prevent a batch: when policy `drop` evicts.

        Evicting earlier gains no batch, and at K = 0 would evict every group as soon as it is claimed.
        """
        return bool(self.due) and not self.missing


def staleness(trained_on: int, oldest: int) -> int:
    """Number trained on minus oldest sampled number.

    Raises:
        InvariantError: if a token is newer than the weights that are trained.
    """
    if oldest > trained_on:
        raise InvariantError(f"a token sampled by version {oldest} cannot be trained on version {trained_on}")
    return trained_on - oldest


def split_staleness(oldest: int, newest: int, trained_on: int) -> StalenessSplit:
    """Staleness of one trajectory, by where it arose.

    Raises:
        InvariantError: unless oldest <= newest <= trained_on.
    """
    return StalenessSplit(in_flight=staleness(newest, oldest), in_queue=staleness(trained_on, newest))


def free_slots(*, max_staleness: int | None, prompts_per_step: int, outstanding: int, published: int, engine: int) -> int:
    """How many more groups an engine may claim now: (K + 1 - (t - e)) * B - outstanding, at least 0.

    Args:
        max_staleness: K; None for unbounded.
        prompts_per_step: B, in groups.
        outstanding: groups admitted and neither published as trained, filtered, evicted nor given up. A group that leaves
            a batch already taken still counts until that batch is published.
        published: t.
        engine: e.

    Returns:
        Groups; `UNLIMITED` if unbounded.

    Raises:
        InvariantError: if the engine is ahead of what was published.
    """
    if engine > published:
        raise InvariantError(f"an engine holds version {engine} but only {published} is published")
    if max_staleness is None:
        return UNLIMITED
    return max(0, (max_staleness + 1 - (published - engine)) * prompts_per_step - outstanding)


def may_readmit(
    *, max_staleness: int | None, prompts_per_step: int, outstanding: int, published: int, engine: int, oldest: int
) -> bool:
    """Whether an engine may take an outstanding group again: a retry, a refill, an adoption or a move.

    Args:
        max_staleness: K that the group was admitted under; None for unbounded.
        prompts_per_step: B, in groups.
        outstanding: outstanding groups, this one included.
        published: t.
        engine: e of the engine that would take it.
        oldest: the number that the group is accounted under: its oldest surviving token, else the engine that last held it.

    Raises:
        InvariantError: if the engine is ahead of what was published.
    """
    slots_without_it = free_slots(
        max_staleness=max_staleness,
        prompts_per_step=prompts_per_step,
        outstanding=outstanding - 1,
        published=published,
        engine=engine,
    )
    return engine >= oldest or slots_without_it > 0


def accept_late_submit(
    *,
    holds_slot: bool,
    max_staleness: int | None,
    prompts_per_step: int,
    outstanding: int,
    published: int,
    oldest: int,
) -> bool:
    """Whether a trajectory counts that comes from an owner which has lost the group's lease.

    Args:
        holds_slot: whether the group is still outstanding and not yet complete.
        max_staleness: K that the group was admitted under; None for unbounded.
        prompts_per_step: B, in groups.
        outstanding: outstanding groups, this one included.
        published: t.
        oldest: number of the trajectory's oldest sampled token.

    Raises:
        InvariantError: if the trajectory is newer than what was published.
    """
    slots_without_it = free_slots(
        max_staleness=max_staleness,
        prompts_per_step=prompts_per_step,
        outstanding=outstanding - 1,
        published=published,
        engine=oldest,
    )
    return holds_slot and slots_without_it > 0  # slots are 0 once t - oldest > K


def plan_batch(
    headers: Sequence[GroupHeader],
    *,
    trained_on: int,
    prompts_per_step: int,
    max_staleness: int | None,
    order: Sampler,
    end_of_data: bool,
) -> BatchPlan:
    """Draw the batch that will be trained on `trained_on`, or name what prevents one.

    The sampler's order is followed as far as every untaken group, ready or in flight, can still meet its deadline.

    Args:
        headers: all outstanding groups; taken ones are passed over.
        trained_on: n; above the published number for a prefetched batch.
        prompts_per_step: B, in groups.
        max_staleness: K of today; at 0 the order is by admission, whatever the sampler. Deadlines use each group's own K.
        order: the sampler.
        end_of_data: no group will be admitted any more; then a short batch is legal once nothing is in flight.

    Raises:
        ConfigError: if the sampler does not return each ready group exactly once.
    """
    live, over_age = _split_by_age(headers, trained_on)
    ready = [h for h in live if h.state is GroupState.READY]
    in_flight = [h for h in live if h.state is GroupState.IN_FLIGHT]
    size = min(len(ready), prompts_per_step) if end_of_data and not in_flight else prompts_per_step
    missing = max(0, size - len(ready))
    due = _due(in_flight, trained_on, prompts_per_step)
    chosen: tuple[str, ...] = ()
    if not due and not missing:
        ordered = _ordered(ready, trained_on, fifo if max_staleness == 0 else order)
        chosen = _pick(ordered, size, _room_for_later(live, trained_on, prompts_per_step, size), trained_on)
    return BatchPlan(chosen, due, missing, tuple(h.group_id for h in over_age))


def fewest_evictions(headers: Sequence[GroupHeader], *, trained_on: int, prompts_per_step: int) -> tuple[str, ...]:
    """The fewest groups to evict, earliest deadline first, so that nothing in flight prevents a batch on `trained_on`.

    Policy `wait` evicts them after `max_wait_seconds`; policy `drop` at once, when `BatchPlan.is_held_by_bound`.

    Args:
        headers: all outstanding groups; taken ones are passed over.
        trained_on: n.
        prompts_per_step: B, in groups.

    Returns:
        Ids: first those whose deadline has passed, then groups in flight. A legal batch exists afterwards if B groups are
        ready; else the freed slots let new ones be claimed.
    """
    live, over_age = _split_by_age(headers, trained_on)
    in_flight = [h for h in live if h.state is GroupState.IN_FLIGHT]
    excess = max([0, *(count for _, count in _excess(in_flight, trained_on, prompts_per_step))])
    return tuple(h.group_id for h in over_age + in_flight[:excess])


def _batches_left(header: GroupHeader, trained_on: int) -> int:
    """Batches after this one that may still train the group; negative once its deadline has passed."""
    return UNLIMITED if header.max_staleness is None else header.oldest + header.max_staleness - trained_on


def _split_by_age(headers: Sequence[GroupHeader], trained_on: int) -> tuple[list[GroupHeader], list[GroupHeader]]:
    """Untaken groups, those that may be trained and those that may not, each by deadline, then admission."""
    untaken = [h for h in headers if h.state is not GroupState.TAKEN]
    untaken.sort(key=lambda h: (_batches_left(h, trained_on), h.admission))
    num_over_age = sum(_batches_left(h, trained_on) < 0 for h in untaken)
    return untaken[num_over_age:], untaken[:num_over_age]


def _excess(groups: Sequence[GroupHeader], trained_on: int, prompts_per_step: int) -> list[tuple[int, int]]:
    """For each deadline n + d that occurs: d, and how many groups up to it the d batches after this one cannot hold.

    Args:
        groups: by deadline.
        trained_on: n.
        prompts_per_step: B.
    """
    count_up_to: dict[int, int] = {}
    for count, header in enumerate(groups, start=1):
        count_up_to[_batches_left(header, trained_on)] = count
    return [(later, count - later * prompts_per_step) for later, count in count_up_to.items()]


def _due(in_flight: Sequence[GroupHeader], trained_on: int, prompts_per_step: int) -> tuple[GroupHeader, ...]:
    """Groups in flight up to the last deadline at which they alone exceed the later batches.

    A batch of ready groups relieves a deadline only by ready groups, so those in flight must fit without it.
    """
    last = max((later for later, excess in _excess(in_flight, trained_on, prompts_per_step) if excess > 0), default=-1)
    return tuple(h for h in in_flight if _batches_left(h, trained_on) <= last)


def _ordered(ready: Sequence[GroupHeader], trained_on: int, order: Sampler) -> Sequence[GroupHeader]:
    ordered = order(ready, trained_on)
    if sorted(h.group_id for h in ordered) != sorted(h.group_id for h in ready):
        raise ConfigError(
            f"the sampler returned {len(ordered)} groups for {len(ready)} ready ones; it must return each exactly once, "
            "in the order it prefers"
        )
    return ordered


def _room_for_later(live: Sequence[GroupHeader], trained_on: int, prompts_per_step: int, size: int) -> dict[int, int]:
    """For each deadline n + d that occurs: places of this batch that groups with a later deadline may take."""
    return {later: max(0, size - max(0, excess)) for later, excess in _excess(live, trained_on, prompts_per_step)}


def _pick(ordered: Sequence[GroupHeader], size: int, room: dict[int, int], trained_on: int) -> tuple[str, ...]:
    """Greedy in the given order; exact, because nested lower bounds form a laminar matroid."""
    chosen: list[str] = []
    for header in ordered:
        earlier = [later for later in room if later < _batches_left(header, trained_on)]
        if len(chosen) < size and all(room[later] for later in earlier):
            chosen.append(header.group_id)
            for later in earlier:
                room[later] -= 1
    return tuple(chosen)
