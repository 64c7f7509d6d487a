"""The staleness rule, case by case; numbers by hand (cases D01, D02) or by trying every batch."""

import itertools
import random
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.errors import ConfigError, InvariantError
from laminar.plugins import resolve
from laminar.policies.samplers import SAMPLERS, Sampler, fifo, freshest_first, oldest_first
from laminar.policies.staleness import (
    UNLIMITED,
    BatchPlan,
    accept_late_submit,
    fewest_evictions,
    free_slots,
    may_readmit,
    plan_batch,
    split_staleness,
    staleness,
)
from laminar.types import GroupHeader, GroupState

READY, IN_FLIGHT, TAKEN = GroupState.READY, GroupState.IN_FLIGHT, GroupState.TAKEN


def group(admission: int, oldest: int, state: GroupState = READY, bound: int | None = 2) -> GroupHeader:
    return GroupHeader(f"{admission:08d}", admission, state, oldest, oldest, bound)


def ids(*admissions: int) -> tuple[str, ...]:
    return tuple(f"{admission:08d}" for admission in admissions)


def plan(
    headers: Sequence[GroupHeader],
    trained_on: int = 10,
    prompts_per_step: int = 2,
    max_staleness: int | None = 2,
    order: Sampler = fifo,
    end_of_data: bool = False,
) -> BatchPlan:
    return plan_batch(
        headers,
        trained_on=trained_on,
        prompts_per_step=prompts_per_step,
        max_staleness=max_staleness,
        order=order,
        end_of_data=end_of_data,
    )


# ---- admission


@pytest.mark.parametrize(
    ("outstanding", "published", "free"),
    [(0, 0, 12), (0, 37, 12), (5, 37, 7), (1, 38, 11), (12, 38, 0), (3, 37, 9), (3, 0, 9)],
)
def test_free_slots_count_only_outstanding_work(outstanding: int, published: int, free: int) -> None:
    """Case D01: K = 2, B = 4; the last row is 4 admitted of which a filter rejected one."""
    slots = free_slots(max_staleness=2, prompts_per_step=4, outstanding=outstanding, published=published, engine=published)
    assert slots == free


@pytest.mark.parametrize(("engine", "free"), [(10, 11), (9, 7), (8, 3), (7, 0), (0, 0)])
def test_each_version_of_lag_costs_one_batch_of_slots(engine: int, free: int) -> None:
    assert free_slots(max_staleness=2, prompts_per_step=4, outstanding=1, published=10, engine=engine) == free


def test_unbounded_admission_has_unlimited_slots() -> None:
    assert free_slots(max_staleness=None, prompts_per_step=4, outstanding=999, published=9, engine=0) == UNLIMITED


def test_an_engine_ahead_of_what_is_published_is_an_error() -> None:
    with pytest.raises(InvariantError, match="version 11 but only 10"):
        free_slots(max_staleness=None, prompts_per_step=4, outstanding=0, published=10, engine=11)


@pytest.mark.parametrize(
    ("engine", "outstanding", "allowed"),
    [
        (8, 8, True),  # not older than its own tokens: no deadline comes nearer
        (9, 8, True),
        (7, 1, False),  # lag 3 > K
        (7, 8, False),
    ],
)
def test_a_retry_needs_an_engine_as_new_as_its_tokens(engine: int, outstanding: int, allowed: bool) -> None:
    arguments = {"max_staleness": 2, "prompts_per_step": 4, "outstanding": outstanding, "published": 10, "oldest": 8}
    assert may_readmit(engine=engine, **arguments) is allowed


def test_a_retry_on_an_older_engine_is_judged_as_a_new_admission_without_itself() -> None:
    arguments = {"max_staleness": 2, "prompts_per_step": 4, "published": 10, "engine": 9, "oldest": 10}
    assert may_readmit(outstanding=8, **arguments)  # 7 others < (2 + 1 - 1) * 4
    assert not may_readmit(outstanding=9, **arguments)


@pytest.mark.parametrize(
    ("oldest", "outstanding", "holds_slot", "accepted"),
    [(10, 12, True, True), (10, 12, False, False), (9, 8, True, True), (9, 9, True, False), (7, 1, True, False)],
)
def test_a_late_submit_counts_only_where_its_age_could_still_be_admitted(
    oldest: int, outstanding: int, holds_slot: bool, accepted: bool
) -> None:
    arguments = {"max_staleness": 2, "prompts_per_step": 4, "published": 10}
    assert accept_late_submit(oldest=oldest, outstanding=outstanding, holds_slot=holds_slot, **arguments) is accepted


# ---- measure (case D02: trained on 12, K = 2)

D02 = {
    "a": (10, 10, 0, 2, 2),
    "b": (9, 11, 2, 1, 3),
    "c": (12, 12, 0, 0, 0),
    "d": (10, 12, 2, 0, 2),
    "e": (9, 9, 0, 3, 3),
    "f": (11, 12, 1, 0, 1),
}


def keep(bound: int) -> list[str]:
    headers = [
        GroupHeader(name, index, READY, oldest, newest, bound)
        for index, (name, (oldest, newest, *_)) in enumerate(D02.items())
    ]
    over_age = plan_batch(
        headers, trained_on=12, prompts_per_step=6, max_staleness=bound, order=fifo, end_of_data=False
    ).over_age
    return [name for name in D02 if name not in over_age]


@pytest.mark.parametrize("name", D02)
def test_staleness_splits_into_in_flight_and_in_queue(name: str) -> None:
    oldest, newest, in_flight, in_queue, total = D02[name]
    split = split_staleness(oldest, newest, 12)
    assert (split.in_flight, split.in_queue, split.total) == (in_flight, in_queue, total)
    assert staleness(12, oldest) == total


def test_the_bound_is_inclusive_and_judges_the_oldest_token() -> None:
    assert keep(bound=2) == ["a", "c", "d", "f"]
    assert keep(bound=0) == ["c"]


def test_means_of_what_is_kept_come_from_each_part() -> None:
    splits = [split_staleness(D02[name][0], D02[name][1], 12) for name in keep(bound=2)]
    assert sum(s.total for s in splits) / 4 == 1.25
    assert sum(s.in_flight for s in splits) / 4 == 0.75
    assert sum(s.in_queue for s in splits) / 4 == 0.5
    assert max(s.total for s in splits) == 2


def test_a_prefetched_batch_is_judged_at_the_version_it_will_be_trained_on() -> None:
    headers = [group(0, 8), group(1, 9)]
    assert plan(headers, trained_on=10, prompts_per_step=1).chosen == ids(0)
    assert plan(headers, trained_on=11, prompts_per_step=1).over_age == ids(0)


def test_a_token_newer_than_the_trained_version_is_an_error() -> None:
    with pytest.raises(InvariantError, match="version 13"):
        staleness(12, 13)


# ---- the batch


def test_no_batch_while_too_few_are_ready() -> None:
    assert plan([group(0, 10), group(1, 10, IN_FLIGHT)]) == BatchPlan((), (), 1, ())


def test_taken_groups_are_passed_over() -> None:
    assert plan([group(0, 8, TAKEN), group(1, 10), group(2, 10)]).chosen == ids(1, 2)


def test_a_straggler_at_its_deadline_is_due_by_name() -> None:
    straggler = group(0, 8, IN_FLIGHT)
    held = plan([straggler, group(1, 10), group(2, 10)])
    assert held == BatchPlan((), (straggler,), 0, ())
    assert held.is_held_by_bound


def test_stragglers_that_exceed_the_batches_left_are_due_before_their_deadline() -> None:
    """n = 10, B = 2: three in flight have deadline 11, but batch 11 holds two."""
    stragglers = tuple(group(i, 9, IN_FLIGHT) for i in range(3))
    ready = [group(3, 10), group(4, 10)]
    assert plan([*stragglers, *ready]).due == stragglers
    assert plan([*stragglers[:2], *ready]).chosen == ids(3, 4)


def test_the_sampler_yields_to_groups_that_would_miss_their_deadline() -> None:
    headers = [group(0, 8), group(1, 9), group(2, 10), group(3, 10)]
    assert plan(headers, order=freshest_first).chosen == ids(2, 0)


def test_a_group_in_flight_takes_up_room_in_later_batches() -> None:
    """Deadline 11 has three groups, two of them in flight: the ready one must go now, whatever the sampler prefers."""
    headers = [group(0, 9, IN_FLIGHT), group(1, 9, IN_FLIGHT), group(2, 9), group(3, 10), group(4, 10)]
    assert plan(headers, order=freshest_first).chosen == ids(3, 2)


def test_at_bound_zero_the_order_is_by_admission_whatever_the_sampler() -> None:
    headers = [group(1, 10, bound=0), group(0, 10, bound=0)]
    assert plan(headers, max_staleness=0, order=lambda ready, _: list(reversed(fifo(ready, 0)))).chosen == ids(0, 1)


def test_unbounded_groups_follow_the_sampler_alone() -> None:
    headers = [group(0, 0, bound=None), group(1, 9, bound=None), group(2, 5, bound=None), group(3, 0, IN_FLIGHT, bound=None)]
    assert plan(headers, max_staleness=None, order=freshest_first) == BatchPlan(ids(1, 2), (), 0, ())


def test_groups_keep_the_bound_they_were_admitted_under() -> None:
    """After a resume with K = 1: group 0 was admitted under 5 and is due last, although it is oldest."""
    headers = [group(0, 7, bound=5), group(1, 9, bound=1), group(2, 10, bound=1), group(3, 10, bound=1)]
    assert plan(headers, max_staleness=1, order=oldest_first).chosen == ids(0, 1)
    assert plan(headers, max_staleness=1, prompts_per_step=1).chosen == ids(1)
    assert plan(headers, trained_on=12, max_staleness=1).over_age == ids(1, 2, 3)


def test_the_end_of_the_data_gives_a_short_last_batch_once_nothing_is_in_flight() -> None:
    assert plan([group(0, 10), group(1, 9, IN_FLIGHT)], end_of_data=True).chosen == ()
    assert plan([group(0, 10)], end_of_data=True) == BatchPlan(ids(0), (), 0, ())
    assert plan([group(0, 10)], end_of_data=False).chosen == ()
    assert plan([], end_of_data=True) == BatchPlan((), (), 0, ())


def test_a_sampler_that_loses_or_repeats_groups_is_refused() -> None:
    headers = [group(0, 10), group(1, 10)]
    with pytest.raises(ConfigError, match="returned 1 groups for 2 ready ones"):
        plan(headers, order=lambda ready, _: ready[:1])
    with pytest.raises(ConfigError, match="exactly once"):
        plan(headers, order=lambda ready, _: [ready[0], ready[0]])


def test_the_readmes_sampler_works_as_a_user_would_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parents[2] / "laminar" / "policies" / "README.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (table,) = map(tomllib.loads, re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    (tmp_path / "my_samplers.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_samplers", raising=False)  # another test's
    order = resolve(table["experience"]["sampler"], SAMPLERS, "experience.sampler")
    headers = [replace(group(n, 10, bound=None), num_bytes=size) for n, size in enumerate([5, 7, 5, 9])]
    assert plan(headers, prompts_per_step=3, max_staleness=None, order=order).chosen == ids(3, 1, 0)


def test_samplers_order_by_admission_age_and_freshness() -> None:
    ready = [group(2, 9), group(0, 9), group(1, 8), group(3, 10)]
    admissions = {name: [h.admission for h in order(ready, 10)] for name, order in ORDERS.items()}
    assert admissions == {"fifo": [0, 1, 2, 3], "oldest_first": [1, 0, 2, 3], "freshest_first": [3, 0, 2, 1]}
    assert set(SAMPLERS) == set(ORDERS)


ORDERS: dict[str, Sampler] = {"fifo": fifo, "oldest_first": oldest_first, "freshest_first": freshest_first}


# ---- evictions


def test_only_as_many_are_evicted_as_a_batch_needs_oldest_first() -> None:
    headers = [group(i, 9, IN_FLIGHT) for i in range(3)] + [group(3, 10), group(4, 10)]
    assert fewest_evictions(headers, trained_on=10, prompts_per_step=2) == ids(0)


def test_nothing_is_evicted_where_nothing_is_due() -> None:
    assert fewest_evictions([group(0, 10), group(1, 10, IN_FLIGHT)], trained_on=10, prompts_per_step=2) == ()


def test_groups_past_their_deadline_are_evicted_whatever_their_state() -> None:
    headers = [group(0, 7), group(1, 6, IN_FLIGHT), group(2, 5, TAKEN), group(3, 10)]
    assert fewest_evictions(headers, trained_on=10, prompts_per_step=2) == ids(1, 0)


# ---- every batch tried


def random_groups(rng: random.Random, trained_on: int, prompts_per_step: int) -> list[GroupHeader]:
    """Outstanding groups as admission leaves them: at most (d + 1) * B with deadline <= n + d."""
    headers: list[GroupHeader] = []
    for admission in range(rng.randint(0, 9)):
        bound = rng.choice([0, 1, 2, 3, None])
        age = rng.randint(0, bound if bound is not None else 5)
        new = [*headers, group(admission, trained_on - age, rng.choice([READY, READY, IN_FLIGHT]), bound)]
        if schedulable(new, trained_on, prompts_per_step):
            headers = new
    return headers


def schedulable(headers: Sequence[GroupHeader], first_batch: int, prompts_per_step: int) -> bool:
    """Whether batches from `first_batch` on, filled by deadline, train every group in time."""
    deadlines = sorted(h.oldest + h.max_staleness for h in headers if h.max_staleness is not None)
    return all(first_batch + index // prompts_per_step <= deadline for index, deadline in enumerate(deadlines))


def legal_batches(
    ordered: Sequence[GroupHeader], headers: Sequence[GroupHeader], n: int, prompts_per_step: int
) -> list[tuple[str, ...]]:
    return [
        tuple(h.group_id for h in batch)
        for batch in itertools.combinations(ordered, prompts_per_step)
        if schedulable([h for h in headers if h not in batch], n + 1, prompts_per_step)
    ]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), prompts_per_step=st.integers(1, 4), sampler=st.sampled_from(sorted(ORDERS)))
def test_the_batch_is_the_first_legal_one_in_the_samplers_order(seed: int, prompts_per_step: int, sampler: str) -> None:
    headers = random_groups(random.Random(seed), 10, prompts_per_step)
    ordered = ORDERS[sampler]([h for h in headers if h.state is READY], 10)
    legal = legal_batches(ordered, headers, 10, prompts_per_step)
    found = plan(headers, prompts_per_step=prompts_per_step, order=ORDERS[sampler])
    assert found.chosen == (legal[0] if legal else ())
    assert found.over_age == ()
    assert bool(legal) == (not found.due and not found.missing)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), prompts_per_step=st.integers(1, 3))
def test_no_smaller_set_of_evictions_gives_a_batch(seed: int, prompts_per_step: int) -> None:
    headers = random_groups(random.Random(seed), 10, prompts_per_step)
    evicted = fewest_evictions(headers, trained_on=10, prompts_per_step=prompts_per_step)
    left = [h for h in headers if h.group_id not in evicted]
    after = plan(left, prompts_per_step=prompts_per_step)
    assert not after.due
    if after.missing:
        return
    assert after.chosen
    in_flight = [h for h in headers if h.state is IN_FLIGHT]
    ready = [h for h in headers if h.state is READY]
    for fewer in itertools.combinations(in_flight, max(0, len(evicted) - 1)):
        kept = [h for h in headers if h not in fewer]
        assert not evicted or not legal_batches(ready, kept, 10, prompts_per_step)
