"""The staleness rule under random schedules: the bound is never broken, nothing is stuck, nothing trainable is thrown away.

A small simulator with long-tailed groups, lagging engines (never ahead of what is published), swaps in flight, failures,
filters, lost leases with retries elsewhere and late submits, prefetched batches, members leaving taken batches, and bounds
that change while groups are outstanding. The same simulator breaks the bound when any one rule is replaced by a naive one.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.policies import samplers, staleness
from laminar.policies.samplers import Sampler
from laminar.policies.staleness import BatchPlan
from laminar.types import GroupHeader, GroupState

READY, IN_FLIGHT, TAKEN = GroupState.READY, GroupState.IN_FLIGHT, GroupState.TAKEN
NUM_ENGINES = 3
ORDERS: dict[str, Sampler] = {
    "fifo": samplers.fifo,
    "oldest_first": samplers.oldest_first,
    "freshest_first": samplers.freshest_first,
}


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules under test; a naive variant replaces one."""

    free_slots: Callable[..., int] = staleness.free_slots
    may_readmit: Callable[..., bool] = staleness.may_readmit
    accept_late_submit: Callable[..., bool] = staleness.accept_late_submit
    plan_batch: Callable[..., BatchPlan] = staleness.plan_batch
    slots_free_at_take: bool = False


@dataclasses.dataclass
class Group:
    """A group of one trajectory; `oldest` is what it is accounted under, `sampled` the versions of its tokens."""

    admission: int
    bound: int | None
    oldest: int
    engine: int | None
    work: int
    state: GroupState = IN_FLIGHT
    sampled: list[int] = dataclasses.field(default_factory=list)

    def header(self) -> GroupHeader:
        newest = max(self.sampled, default=self.oldest)
        return GroupHeader(str(self.admission), self.admission, self.state, self.oldest, newest, self.bound)


class BoundBrokenError(Exception):
    """A group can no longer be trained within its bound."""


class Schedule:
    """One run: events drawn at random; every plan is checked."""

    def __init__(
        self, rng: random.Random, *, bound: int | None, prompts_per_step: int, order: Sampler, policy: str, rules: Rules
    ) -> None:
        self.rng, self.bound, self.prompts_per_step, self.order = rng, bound, prompts_per_step, order
        self.policy, self.rules = policy, rules
        self.published = 0
        self.engines = [0] * NUM_ENGINES
        self.groups: dict[int, Group] = {}  # outstanding
        self.late: list[tuple[Group, list[int]]] = []
        self.taken: list[list[Group]] = []
        self.counts = dict.fromkeys(("admitted", "trained", "filtered", "failed", "evicted", "masked"), 0)
        self.largest = 0

    # -- what the rules see

    @property
    def outstanding(self) -> int:
        return sum(g.state is not TAKEN or not self.rules.slots_free_at_take for g in self.groups.values())

    def facts(self, bound: int | None, **more: object) -> dict[str, object]:
        return {
            "max_staleness": bound,
            "prompts_per_step": self.prompts_per_step,
            "outstanding": self.outstanding,
            "published": self.published,
            **more,
        }

    def some(self, condition: Callable[[Group], bool]) -> Group | None:
        found = [g for g in self.groups.values() if condition(g)]
        return self.rng.choice(found) if found else None

    # -- rollout events

    def claim(self) -> None:
        engine = self.rng.randrange(NUM_ENGINES)
        slots = self.rules.free_slots(**self.facts(self.bound, engine=self.engines[engine]))
        for _ in range(min(slots, self.rng.randint(1, 2 * self.prompts_per_step))):
            work = self.rng.choice([1, 1, 1, 1, 2, 2, 3, 10])
            admission = self.counts["admitted"]
            self.groups[admission] = Group(admission, self.bound, self.engines[engine], engine, work)
            self.counts["admitted"] += 1

    def generate(self) -> None:
        for g in list(self.groups.values()):
            if g.state is IN_FLIGHT and g.engine is not None and self.rng.random() < 0.7:
                g.sampled.append(self.engines[g.engine])
                g.work -= 1
                if g.work <= 0:
                    self.complete(g, g.sampled)

    def complete(self, g: Group, sampled: list[int]) -> None:
        g.state, g.sampled, g.oldest = READY, sampled, min(sampled)

    def swap(self) -> None:
        engine = self.rng.randrange(NUM_ENGINES)
        self.engines[engine] = self.rng.choice([self.published, self.rng.randint(self.engines[engine], self.published)])

    def lose(self) -> None:
        g = self.some(lambda g: g.state is IN_FLIGHT and g.engine is not None)
        if g is None:
            return
        self.late.append((g, [*g.sampled, self.engines[g.engine or 0]]))
        g.engine = None
        if self.rng.random() < 0.7:
            g.sampled = []

    def adopt(self) -> None:
        engine = self.rng.randrange(NUM_ENGINES)
        number = self.engines[engine]
        g = self.some(lambda g: g.state is IN_FLIGHT and g.engine is None)
        if g and self.rules.may_readmit(**self.facts(g.bound, engine=number, oldest=g.oldest)):
            g.engine, g.oldest = engine, min([number, *g.sampled])

    def submit_late(self) -> None:
        if not self.late:
            return
        g, sampled = self.late.pop(self.rng.randrange(len(self.late)))
        holds_slot = g.admission in self.groups and g.state is IN_FLIGHT
        if self.rules.accept_late_submit(**self.facts(g.bound, holds_slot=holds_slot, oldest=min(sampled))) and holds_slot:
            self.complete(g, sampled)

    def fail(self) -> None:
        self.leave(self.some(lambda g: g.state is IN_FLIGHT), "failed")

    def filter(self) -> None:
        self.leave(self.some(lambda g: g.state is READY), "filtered")

    def leave(self, g: Group | None, how: str) -> None:
        if g is not None and (how in ("trained", "masked", "evicted") or self.rng.random() < 0.3):
            del self.groups[g.admission]
            self.counts[how] += 1

    # -- trainer events

    def plan(self, end_of_data: bool = False) -> BatchPlan:
        n = self.published + len(self.taken)
        headers = [g.header() for g in self.groups.values()]
        found = self.rules.plan_batch(
            headers,
            trained_on=n,
            prompts_per_step=self.prompts_per_step,
            max_staleness=self.bound,
            order=self.order,
            end_of_data=end_of_data,
        )
        for g in self.groups.values():
            if g.state is not TAKEN and g.bound is not None and n - min([g.oldest, *g.sampled]) > g.bound:
                raise BoundBrokenError(f"bound {g.bound}: group of version {min([g.oldest, *g.sampled])} left for batch {n}")
        if self.rules == Rules():
            self.check(found, headers, n)
        return found

    def check(self, found: BatchPlan, headers: list[GroupHeader], n: int) -> None:
        """Never stuck: once what is in flight ends there is a batch, or room for more groups."""
        assert found.over_age == ()
        ended = [dataclasses.replace(h, state=READY) if h.state is IN_FLIGHT else h for h in headers]
        facts: dict[str, Any] = {"trained_on": n, "prompts_per_step": self.prompts_per_step, "max_staleness": self.bound}
        then = staleness.plan_batch(ended, order=self.order, end_of_data=False, **facts)
        untaken = sum(h.state is not TAKEN for h in headers)
        assert then.chosen or untaken < self.prompts_per_step
        if untaken < self.prompts_per_step and not self.taken:
            assert self.rules.free_slots(**self.facts(self.bound, engine=self.published)) > 0

    def train(self) -> None:
        """Take a batch, at most one ahead of the one in training, or act on what is due."""
        if len(self.taken) == 2:
            return
        found = self.plan()
        impatient = self.policy == "wait" and self.rng.random() < 0.01
        if found.is_held_by_bound and (self.policy == "drop" or impatient):
            n = self.published + len(self.taken)
            headers = [g.header() for g in self.groups.values()]
            for name in staleness.fewest_evictions(headers, trained_on=n, prompts_per_step=self.prompts_per_step):
                self.leave(self.groups[int(name)], "evicted")
            found = self.plan()
            assert found.chosen
        self.take(found.chosen)

    def take(self, chosen: tuple[str, ...]) -> None:
        batch = [self.groups[int(name)] for name in chosen]
        for g in batch:
            g.state = TAKEN
            if g.bound is not None:
                self.largest = max(self.largest, self.published + len(self.taken) - min(g.sampled))
        if batch:
            self.taken.append(batch)

    def publish(self) -> None:
        if self.taken:
            self.published += 1
            for g in self.taken.pop(0):
                self.leave(g, self.rng.choice(["trained"] * 9 + ["masked"]))

    def run(self, num_events: int) -> None:
        trainer_speed, trouble = self.rng.choice([1, 3, 8]), self.rng.choice([0, 1, 3])
        events = [self.claim] * 8 + [self.generate] * 16 + [self.swap] * 6
        events += [self.train, self.publish] * trainer_speed
        events += [self.lose, self.adopt, self.adopt, self.submit_late, self.fail, self.filter] * trouble
        for _ in range(num_events):
            self.rng.choice(events)()

    def end(self) -> None:
        """No new prompts, no trouble: everything outstanding is trained, in full batches but for the last."""
        for _ in range(len(self.groups) + 2):
            while self.taken:
                self.publish()
            self.engines = [self.published] * NUM_ENGINES
            while self.some(lambda g: g.state is IN_FLIGHT and g.engine is None):
                self.adopt()
            for g in self.groups.values():
                if g.state is IN_FLIGHT:
                    self.complete(g, [*g.sampled, self.published])
            num_left = len(self.groups)
            self.take(self.plan(end_of_data=True).chosen)
            assert sum(map(len, self.taken)) == min(num_left, self.prompts_per_step)
        assert not self.groups


schedules = {
    "seed": st.integers(0, 2**32),
    "bound": st.sampled_from([0, 1, 2, 4]),
    "prompts_per_step": st.integers(1, 8),
    "order": st.sampled_from(sorted(ORDERS)),
}


def simulate(
    seed: int,
    bound: int | None,
    prompts_per_step: int,
    order: str,
    policy: str = "wait",
    rules: Rules = Rules(),
    num_events: int = 400,
) -> Schedule:
    schedule = Schedule(
        random.Random(seed),
        bound=bound,
        prompts_per_step=prompts_per_step,
        order=ORDERS[order],
        policy=policy,
        rules=rules,
    )
    schedule.run(num_events)
    return schedule


@settings(max_examples=120, deadline=None, derandomize=True)
@given(**schedules, policy=st.sampled_from(["wait", "patient", "drop"]))
def test_the_bound_holds_and_everything_admitted_ends_once(
    seed: int, bound: int, prompts_per_step: int, order: str, policy: str
) -> None:
    schedule = simulate(seed, bound, prompts_per_step, order, policy)
    assert schedule.largest <= bound
    schedule.end()
    assert schedule.largest <= bound
    ends = sum(count for how, count in schedule.counts.items() if how != "admitted")
    assert ends == schedule.counts["admitted"]
    assert policy != "patient" or schedule.counts["evicted"] == 0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(**schedules, bounds=st.lists(st.sampled_from([0, 1, 2, 4, None]), min_size=1, max_size=3))
def test_the_bound_of_each_group_holds_while_the_setting_changes(
    seed: int, bound: int, prompts_per_step: int, order: str, bounds: list[int | None]
) -> None:
    schedule = simulate(seed, bound, prompts_per_step, order)
    for schedule.bound in bounds:
        schedule.run(60)
    schedule.end()


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_schedules_reach_the_bound_so_it_is_tight(bound: int) -> None:
    assert max(simulate(seed, bound, 2, "freshest_first").largest for seed in range(20)) == bound


def test_a_fast_producer_stays_within_the_bound_after_a_resume() -> None:
    """Case D01, last part: K = 2, B = 4, resumed at 37, ten steps, all slots always filled."""
    schedule = Schedule(random.Random(0), bound=2, prompts_per_step=4, order=samplers.fifo, policy="patient", rules=Rules())
    schedule.published, schedule.engines = 37, [37] * NUM_ENGINES
    for step in range(10):
        for _ in range(40):
            schedule.claim()
        assert len(schedule.groups) == 12
        for g in schedule.groups.values():
            if g.state is IN_FLIGHT:
                schedule.complete(g, [schedule.engines[0]])
        schedule.train()
        schedule.publish()
        schedule.engines = [schedule.published] * NUM_ENGINES
        assert schedule.published == 38 + step
    assert schedule.largest == 2


# ---- the harness can fail: each rule is needed


def without_lag(*, max_staleness: int, prompts_per_step: int, outstanding: int, **_: int) -> int:
    return max(0, (max_staleness + 1) * prompts_per_step - outstanding)


def in_order_only(
    headers: list[GroupHeader], *, trained_on: int, prompts_per_step: int, order: Sampler, **_: object
) -> BatchPlan:
    ready = order([h for h in headers if h.state is READY], trained_on)
    chosen = tuple(h.group_id for h in ready[:prompts_per_step]) if len(ready) >= prompts_per_step else ()
    return BatchPlan(chosen, (), 0, ())


def deadline_of_today_only(headers: list[GroupHeader], *, trained_on: int, order: Sampler, **more: Any) -> BatchPlan:
    """Protects groups only once their deadline has come; later deadlines are not looked at."""
    rank = {h.group_id: index for index, h in enumerate(order(headers, trained_on))}
    late = {h.group_id for h in headers if h.oldest + (h.max_staleness or 0) <= trained_on}
    blind = [h if h.group_id in late else dataclasses.replace(h, max_staleness=None) for h in headers]
    return staleness.plan_batch(
        blind, trained_on=trained_on, order=lambda ready, _: sorted(ready, key=lambda h: rank[h.group_id]), **more
    )


NAIVE = {
    "lag ignored": Rules(free_slots=without_lag),
    "slots freed when a batch is taken": Rules(slots_free_at_take=True),
    "batches in the sampler's order alone": Rules(plan_batch=in_order_only),
    "only groups at their deadline protected": Rules(plan_batch=deadline_of_today_only),
    "retries on any engine": Rules(may_readmit=lambda **_: True),
    "late submits always accepted": Rules(accept_late_submit=lambda **_: True),
}


@pytest.mark.parametrize("fault", NAIVE)
def test_the_bound_breaks_where_a_rule_is_naive(fault: str) -> None:
    def breaks(seed: int) -> bool:
        rng = random.Random(seed)
        try:
            simulate(seed, rng.choice([1, 2]), rng.randint(1, 4), "freshest_first", "patient", NAIVE[fault])
        except BoundBrokenError:
            return True
        return False

    assert any(breaks(seed) for seed in range(200))
