"""Who takes from whom, in which pieces, and which version next."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.policies.chain import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Hop,
    best_chunk_bytes,
    broadcast_seconds,
    order_hops,
    pick_offer,
    upstream_of,
)
from laminar.types import WeightVersion

MASTER = Hop("m", 5.0, is_master=True)
CHAIN = [MASTER, Hop("a", 1.0), Hop("b", 2.0), Hop("c", 3.0)]


def version(number: int) -> WeightVersion:
    return WeightVersion(0, number)


def upstream(node: str, joined: float, hops, avoided=()) -> str | None:
    found = upstream_of(node, joined, hops, avoided)
    return found.node_id if found else None


def test_the_master_is_first_and_the_rest_follow_in_the_order_they_joined():
    for hops in itertools.permutations(CHAIN):
        assert [hop.node_id for hop in order_hops(hops)] == ["m", "a", "b", "c"]


def test_each_hop_takes_from_the_one_before_it():
    assert [upstream(hop.node_id, hop.joined, CHAIN) for hop in CHAIN[1:]] == ["m", "a", "b"]


def test_a_dead_hop_is_spliced_out_and_only_its_successor_changes():
    living = [hop for hop in CHAIN if hop.node_id != "a"]
    assert upstream("b", 2.0, living) == "m"
    assert upstream("c", 3.0, living) == "b"


def test_a_late_joiner_takes_from_the_last():
    assert upstream("z", 9.0, CHAIN) == "c"


def test_a_hop_that_failed_this_one_is_passed_over_and_with_all_avoided_there_is_none():
    assert upstream("c", 3.0, CHAIN, {"b"}) == "a"
    assert upstream("c", 3.0, CHAIN, {"b", "a", "m"}) is None


def test_a_blocked_hop_passes_nothing_on_but_keeps_its_place():
    hops = [MASTER, Hop("a", 1.0, is_blocked=True), Hop("b", 2.0)]
    assert upstream("b", 2.0, hops) == "m"
    assert upstream("a", 1.0, hops) == "m"


def test_without_a_master_the_first_hop_has_no_upstream_and_the_others_keep_theirs():
    hops = CHAIN[1:]
    assert upstream("a", 1.0, hops) is None
    assert upstream("b", 2.0, hops) == "a"


def test_of_two_masters_the_later_one_leads():
    assert upstream("a", 1.0, [MASTER, Hop("n", 7.0, is_master=True)]) == "n"


views = st.lists(st.tuples(st.booleans(), st.booleans(), st.frozensets(st.sampled_from("abcd"))), min_size=4, max_size=4)


@given(views)
def test_however_different_the_hops_views_of_each_other_are_they_never_take_in_a_circle(seen):
    hops = {name: Hop(name, place) for place, name in enumerate("abcd")}
    edges = {}
    for hop, (knows_master, blocked, avoided) in zip(hops.values(), seen, strict=True):
        known = [Hop(h.node_id, h.joined, is_blocked=blocked and h.node_id == "a") for h in hops.values()]
        found = upstream_of(hop.node_id, hop.joined, [*known, *([MASTER] if knows_master else [])], avoided)
        edges[hop.node_id] = found.node_id if found else None
    for name in hops:
        step, at = 0, name
        while at in edges and edges[at] is not None:
            at, step = edges[at], step + 1
            assert step <= len(hops)


def test_a_version_that_was_begun_is_finished_before_the_newest():
    held = [version(4), version(6)]
    assert pick_offer(held, newer_than=version(3), resuming=version(4)) == version(4)
    assert pick_offer(held, newer_than=version(4), resuming=None) == version(6)


def test_a_version_that_the_upstream_no_longer_has_gives_way_to_the_newest():
    assert pick_offer([version(6), version(7)], newer_than=version(3), resuming=version(4)) == version(7)


def test_nothing_is_offered_that_is_not_newer():
    assert pick_offer([version(3)], newer_than=version(3), resuming=None) is None
    assert pick_offer([version(3)], newer_than=version(3), resuming=version(3)) is None
    assert pick_offer([], newer_than=None, resuming=None) is None


def test_a_new_lineage_is_newer_whatever_its_number():
    assert pick_offer([version(9), WeightVersion(1, 2)], newer_than=version(9), resuming=None) == WeightVersion(1, 2)


def test_broadcast_time_of_the_paper_by_hand():
    # 5 machines, 4 pieces of 250 bytes at 1 ms a byte and 0.5 s a start: 7 slots of 0.75 s
    seconds = broadcast_seconds(num_machines=5, num_chunks=4, file_bytes=1000, seconds_per_byte=0.001, start_seconds=0.5)
    assert seconds == pytest.approx(5.25)


@pytest.mark.parametrize("num_machines", [3, 5, 9, 129])
def test_no_other_number_of_pieces_is_faster_by_more_than_the_rounding(num_machines):
    constants = {"num_machines": num_machines, "file_bytes": 10**9, "seconds_per_byte": 1e-9, "start_seconds": 2e-3}
    chunk = best_chunk_bytes(**constants)
    chosen = broadcast_seconds(num_chunks=-(-(10**9) // chunk), **constants)
    allowed = range(-(-(10**9) // MAX_CHUNK_BYTES), 10**9 // MIN_CHUNK_BYTES)
    assert chosen <= 1.02 * min(broadcast_seconds(num_chunks=k, **constants) for k in allowed)


def test_two_machines_take_the_largest_pieces_and_cheap_starts_the_smallest():
    assert best_chunk_bytes(num_machines=2, file_bytes=10**9, seconds_per_byte=1e-9, start_seconds=1e-3) == MAX_CHUNK_BYTES
    assert best_chunk_bytes(num_machines=64, file_bytes=10**9, seconds_per_byte=1e-9, start_seconds=1e-9) == MIN_CHUNK_BYTES
