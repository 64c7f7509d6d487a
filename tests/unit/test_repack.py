"""Repack plans: on fleets by hand, and on random ones."""

import dataclasses
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.policies.repack import Move, RepackLimits, ReplicaLoad, latch_idle, plan_repack, request_bound
from laminar.types import WeightVersion

V0, V1, V2 = (WeightVersion(0, number) for number in range(3))
CAPACITY = 100_000
LIMITS = RepackLimits(kv_high=0.8, kv_limit=0.99, headroom_tokens=0, max_requests=100)


def load(name, share=0.2, *, version=V0, num_open=4, waiting=0, admitted=0, remaining=1000, capacity=CAPACITY):
    return ReplicaLoad(name, version, round(share * capacity), capacity, num_open, waiting, admitted, remaining)


def plan(*loads, limits=LIMITS, newest=V1, idle=None):
    return plan_repack(loads, {each.replica for each in loads} if idle is None else idle, newest, limits)


def test_two_fifths_and_a_half_hold_one_more_fifth_but_not_each_other():
    """The published algorithm may judge .4 by the .5 of before, and fill one cache to 1.1."""
    assert plan(load("a", 0.2), load("b", 0.4), load("c", 0.5)) == (Move("a", "c"),)


def test_sources_go_in_ascending_order_each_to_the_fullest_that_fits():
    loads = (load("a", 0.1), load("b", 0.15), load("c", 0.3), load("d", 0.7))
    assert plan(*loads) == (Move("a", "d"), Move("b", "d"))


def test_a_replica_that_takes_guests_in_is_not_emptied_in_the_same_plan():
    """.3 goes to .4; the .4, now .7, would fit into .2 with a larger cache, but stays."""
    moves = plan(load("a", 0.3), load("b", 0.4), load("c", 0.41, capacity=3 * CAPACITY, num_open=99))
    assert moves == (Move("a", "b"),)


def test_the_last_straggler_stays_idle_while_its_cache_grows_and_is_moved():
    """The paper's test "use fell since the last look" fails for a lone trajectory, whose cache can only grow."""
    latched: dict[str, int] = {}
    for share in (0.05, 0.07, 0.09, 0.11):
        loads = [load("tail", share, num_open=1, admitted=7), load("other", 0.5, num_open=30, admitted=7)]
        latched = latch_idle(latched, loads, 0.8)
        assert plan_repack(loads, latched, V1, LIMITS) == (Move("tail", "other"),)


def test_a_latched_replica_stays_idle_above_the_mark_until_new_work_comes():
    latched = latch_idle({}, [load("a", 0.79, admitted=3)], 0.8)
    assert latched == {"a": 3}
    latched = latch_idle(latched, [load("a", 0.85, admitted=3)], 0.8)
    assert latched == {"a": 3}
    assert latch_idle(latched, [load("a", 0.85, admitted=4)], 0.8) == {}


def test_a_replica_where_something_waits_is_not_idle():
    assert latch_idle({}, [load("a", 0.1, waiting=1)], 0.8) == {}


def test_versions_never_mix():
    assert plan(load("a", version=V0), load("b", version=V1), newest=V2) == ()


def test_nothing_is_planned_while_no_newer_version_waits():
    assert plan(load("a"), load("b"), newest=V0) == ()


def test_nothing_is_planned_for_empty_replicas():
    assert plan(load("a", 0, num_open=0), load("b", 0.2)) == ()


def test_a_busy_replica_is_a_destination_but_no_source():
    assert plan(load("a", 0.2), load("b", 0.3), idle={"b"}) == (Move("b", "a"),)


def test_the_request_bound_holds():
    limits = dataclasses.replace(LIMITS, max_requests=8)
    loads = load("a", 0.1, num_open=4, remaining=5000), load("b", 0.2, num_open=4)
    assert plan(loads[0], dataclasses.replace(loads[1], num_open=5), limits=limits) == ()
    assert plan(*loads, limits=limits) == (Move("a", "b"),)


def test_room_for_growth_is_kept():
    """50,000 + 40,000 tokens and 10 trajectories that grow by 900 each: 99,000 is the limit of 100,000 at .99."""
    loads = (load("a", 0.4, num_open=5), load("b", 0.5, num_open=5))
    assert plan(*loads, limits=dataclasses.replace(LIMITS, headroom_tokens=900)) == (Move("a", "b"),)
    assert plan(*loads, limits=dataclasses.replace(LIMITS, headroom_tokens=901)) == ()


def test_trajectories_with_much_ahead_share_a_cache_that_is_emptier_in_proportion():
    """With 4,000 tokens ahead and 3,000 in a full cache (.99), .7425 may be used: .24 and .5 fit, .25 and .5 do not."""
    limits = dataclasses.replace(LIMITS, crowded_tokens=3000)
    full, ahead = load("b", 0.5, remaining=1000), 4000
    assert plan(load("a", 0.24, remaining=ahead), full, limits=limits) == (Move("a", "b"),)
    assert plan(load("a", 0.25, remaining=ahead), full, limits=limits) == ()
    assert plan(load("a", 0.25, remaining=1000), dataclasses.replace(full, remaining_tokens=ahead), limits=limits) == ()
    assert plan(load("a", 0.49, remaining=3000), full, limits=limits) == (Move("a", "b"),)
    assert plan(load("a", 0.25, remaining=ahead), full) == (Move("a", "b"),)


def test_a_move_that_costs_more_than_it_frees_is_not_made():
    """20,000 tokens computed anew at 100 requests a step cost 200 steps: the rest must be longer than that."""
    assert plan(load("a", 0.2, remaining=200), load("b", 0.5, remaining=200)) == ()
    assert plan(load("a", 0.2, remaining=201), load("b", 0.5, remaining=201)) == (Move("a", "b"),)


def test_the_roofline_of_an_h100_bounds_bfloat16_at_its_operations_per_byte():
    assert request_bound(989e12 / 3.35e12, 2) == 295


FLEETS = st.lists(
    st.tuples(
        st.floats(0, 1.2), st.sampled_from([V0, V1]), st.integers(0, 40), st.integers(0, 2), st.integers(0, 3000),
        st.sampled_from([CAPACITY, CAPACITY // 2, 3 * CAPACITY]), st.booleans(),
    ),
    min_size=1, max_size=24,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    FLEETS, st.sampled_from([0, 200, 1500]), st.sampled_from([1, 16, 64, 1000]), st.sampled_from([V0, V1, V2]),
    st.sampled_from([None, 400, 1500]),
)  # fmt: skip
def test_every_plan_keeps_the_rules_on_random_fleets(fleet, headroom, max_requests, newest, crowded):
    limits = RepackLimits(0.8, 0.95, headroom, max_requests, crowded)
    loads, idle = {}, set()
    for index, (share, version, num_open, waiting, remaining, capacity, is_idle) in enumerate(fleet):
        name = f"r{index:02d}"
        loads[name] = load(
            name, share, version=version, num_open=num_open, waiting=waiting, remaining=remaining, capacity=capacity
        )
        idle |= {name} if is_idle else set()
    moves = plan_repack(list(loads.values()), idle, newest, limits)
    sources, destinations = [m.source for m in moves], [m.destination for m in moves]
    assert len(set(sources)) == len(sources)
    assert not set(sources) & set(destinations)
    for move in moves:
        source = loads[move.source]
        assert source.replica in idle
        assert source.version == loads[move.destination].version < newest
        assert source.num_open
        assert loads[move.destination].num_open
        assert source.remaining_tokens > source.context_tokens / max_requests
    for name in set(destinations):
        together = [loads[name], *(loads[m.source] for m in moves if m.destination == name)]
        num_open = sum(each.num_open for each in together)
        grown = sum(each.context_tokens for each in together) + headroom * num_open
        assert num_open <= max_requests
        assert grown <= 0.95 * loads[name].capacity_tokens
        longest = max(each.remaining_tokens for each in together)
        if crowded is not None and longest > crowded:
            assert grown * longest <= 0.95 * loads[name].capacity_tokens * crowded * (1 + 1e-9)
    rest = [loads[name] for name in loads.keys() - set(sources) - set(destinations)]
    for source, destination in permutations(rest, 2):
        if source.replica in idle and source.version == destination.version < newest:
            assert not could_move(source, destination, limits), "a move that fits and pays was left out"


def could_move(source, destination, limits):
    """Float by float, apart from the code under test."""
    num_open = source.num_open + destination.num_open
    grown = source.context_tokens + destination.context_tokens + limits.headroom_tokens * num_open
    longest, limit = max(source.remaining_tokens, destination.remaining_tokens), limits.kv_limit
    if limits.crowded_tokens and longest > limits.crowded_tokens:
        limit = limit * limits.crowded_tokens / longest
    return (
        min(source.num_open, destination.num_open) > 0
        and source.num_waiting == destination.num_waiting == 0
        and num_open <= limits.max_requests
        and grown <= limit * destination.capacity_tokens
        and source.remaining_tokens * limits.max_requests > source.context_tokens
    )


def test_a_thousand_replicas_are_consolidated_into_few():
    """Each holds 2 % of a cache: 49 fit into .99, so 1,000 need at least 21 destinations."""
    loads = [load(f"r{index:04d}", 0.02, num_open=2) for index in range(1000)]
    moves = plan(*loads, limits=dataclasses.replace(LIMITS, max_requests=1000))
    assert len(loads) - len(moves) == 21
