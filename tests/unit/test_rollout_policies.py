"""Small rules of the rollout tier: the in-flight limit, where time goes, room for guests, and the manager's plans."""

import asyncio
from dataclasses import replace

import pytest

from laminar.config.rollout import RepackConfig, RolloutConfig
from laminar.config.root import LaminarConfig
from laminar.config.sizes import repack_limits
from laminar.directory import ReplicaEntry
from laminar.policies.in_flight import next_limit
from laminar.policies.over_provision import tail_of_batch
from laminar.policies.repack import Move, RepackLimits
from laminar.types import GroupHeader, GroupState
from rollout.engines.wire import EngineLoad
from rollout.manager import Repacker, metrics_of
from rollout.occupants import GuestLimits, Occupant
from rollout.worker_counts import DECODE, PREFILL, WorkerCounts

QUIET = {"ceiling": 16, "kv_share": 0.5, "num_waiting": 0, "num_retracted": 0}


def test_a_full_worker_without_pressure_may_play_one_more_up_to_the_ceiling():
    assert next_limit(8, in_flight=8, **QUIET) == 9
    assert next_limit(16, in_flight=16, **QUIET) == 16


def test_a_worker_with_room_left_keeps_its_limit():
    assert next_limit(8, in_flight=5, **QUIET) == 8


@pytest.mark.parametrize(
    "pressure", [{"num_retracted": 1}, {"num_waiting": 1, "kv_share": 0.96}], ids=["preemption", "full cache"]
)
def test_pressure_lowers_the_limit_below_what_is_in_flight_but_not_below_one(pressure):
    assert next_limit(16, in_flight=8, **QUIET | pressure) == 6
    assert next_limit(1, in_flight=1, **QUIET | pressure) == 1


def test_no_limit_is_above_the_ceiling():
    """Not under pressure either, where 64 groups are still played after the ceiling was lowered to 16."""
    assert next_limit(64, in_flight=64, **QUIET) == 16
    assert next_limit(64, in_flight=64, **QUIET | {"num_retracted": 1}) == 12


def test_a_queue_alone_is_no_pressure_but_no_reason_to_grow():
    assert next_limit(8, in_flight=8, **QUIET | {"num_waiting": 3}) == 8


def test_the_engines_own_seconds_split_the_time_in_which_it_generated():
    counts = WorkerCounts(RolloutConfig())
    load = EngineLoad(running=1, waiting=0, used_tokens=0, capacity_tokens=1, generated_tokens=0)
    first = replace(load, prefill_seconds=1.0, decode_seconds=3.0)
    assert counts.split_generating({DECODE: 8.0, "time/state_idle_seconds": 5.0}, first) == {
        DECODE: 6.0, PREFILL: 2.0, "time/state_idle_seconds": 5.0,
    }  # fmt: skip
    assert counts.split_generating({DECODE: 9.0}, None) == {DECODE: 7.0, PREFILL: 2.0}  # it does not answer
    restarted = replace(load, prefill_seconds=0.5, decode_seconds=0.0)
    assert counts.split_generating({DECODE: 10.0}, restarted) == {DECODE: 8.0, PREFILL: 2.0}
    second = replace(load, prefill_seconds=0.5, decode_seconds=4.0)
    assert counts.split_generating({DECODE: 14.0}, second) == {DECODE: 12.0, PREFILL: 2.0}


def test_an_occupant_is_expected_to_go_on_for_as_long_as_it_has_within_its_budget():
    occupant = Occupant()
    occupant.begin(50, 300)
    occupant.grow(100)
    assert (occupant.context_tokens, occupant.sampled_tokens, occupant.expected_tokens) == (150, 100, 100)
    occupant.grow(150)
    assert occupant.expected_tokens == 50


def test_a_guest_needs_room_for_everybodys_growth_and_a_place_among_the_requests():
    """100 + 200 tokens and 50 of growth for each of two: 400 of 500, at most 0.8."""
    limits = GuestLimits(kv_limit=0.8, headroom_tokens=50, max_requests=2)
    occupants = [Occupant(context_tokens=200)]
    assert limits.refusal(occupants, 100, 500) == ""
    assert "401 tokens" in limits.refusal(occupants, 101, 500)
    assert "2 of at most 2" in limits.refusal([*occupants, Occupant()], 1, 500)


def entry(name, context, *, draining=True, version="0.0", num_open=4, admitted=1, waiting=0):
    return ReplicaEntry(name, f"http://{name}", version, "0.1", draining, context, 1000, num_open, waiting, admitted, 500)


def repacker(outcomes):
    calls = []

    async def release(source, destination, version):
        calls.append((source, destination))
        assert version == "0.0"
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Repacker(RepackConfig(), RepackLimits(0.8, 0.95, 0, 64), release), calls


async def test_the_manager_sends_the_smallest_to_the_fullest_and_counts_what_came_of_it():
    manager, calls = repacker([{"moved": 3, "stayed": 1, "guests": 0}, {"moved": 4, "stayed": 0, "guests": 2}])
    moves = await manager.consolidate([entry("a", 100), entry("b", 150), entry("c", 600)])
    assert moves == (Move("a", "c"), Move("b", "c"))
    assert sorted(calls) == [("http://a", "http://c"), ("http://b", "http://c")]
    tally = manager.tally
    assert (tally.plans, tally.moved_trajectories, tally.failed_moves, tally.released_replicas) == (1, 9, 1, 1)
    assert tally.moved_tokens == 100 * 3 / 4 + 150


async def test_a_replica_that_does_not_drain_is_neither_emptied_nor_filled():
    manager, calls = repacker([])
    assert await manager.consolidate([entry("a", 100), entry("b", 600, draining=False)]) == ()
    assert calls == []


async def test_a_slow_source_holds_no_other_plan_up_and_is_in_none_until_its_move_has_ended():
    slow, calls = asyncio.Event(), []

    async def release(source, destination, version):
        calls.append((source, destination))
        if source == "http://a":
            await slow.wait()
        return {"moved": 1, "stayed": 0, "guests": 0}

    manager = Repacker(RepackConfig(), RepackLimits(0.8, 0.95, 0, 64), release)
    entries = [entry("a", 100), entry("c", 700)]
    first = asyncio.create_task(manager.consolidate(entries))
    while not calls:
        await asyncio.sleep(0)
    more = [*entries, entry("d", 120), entry("e", 710)]
    assert await manager.consolidate(more) == (Move("d", "e"),)
    assert manager.plan(entries) == ()
    slow.set()
    assert await first == (Move("a", "c"),)
    assert manager.plan(entries) == (Move("a", "c"),)


def header(number, state=GroupState.IN_FLIGHT):
    return GroupHeader(f"g{number}", number, state, 0, 0, 2)


@pytest.mark.parametrize(("ratio", "tail"), [(1.0, ()), (1.25, ("g0",)), (1.5, ("g0", "g2")), (4.0, ("g0", "g2", "g3"))])
def test_what_a_batch_of_four_overtakes_is_recycled_oldest_first_up_to_the_surplus(ratio, tail):
    """Batch g1, g4, g5, g7; g6 is ready, g8 was admitted later."""
    chosen = ("g1", "g4", "g5", "g7")
    ready = {1, 4, 5, 6, 7}
    headers = [header(i, GroupState.READY if i in ready else GroupState.IN_FLIGHT) for i in (8, 3, 0, 1, 2, 4, 5, 6, 7)]
    assert tail_of_batch(headers, chosen, ratio=ratio, prompts_per_step=4) == tail


async def test_a_source_that_does_not_answer_costs_nothing_but_a_line_in_the_log():
    manager, _ = repacker([ConnectionRefusedError("gone"), {"moved": 4, "stayed": 0, "guests": 0}])
    await manager.consolidate([entry("a", 100), entry("b", 150), entry("c", 600)])
    assert (manager.tally.moved_trajectories, manager.tally.released_replicas) == (4, 1)


async def test_a_replica_of_unknown_weights_is_left_alone():
    manager, _ = repacker([])
    assert await manager.consolidate([entry("a", 100, version=""), entry("b", 600)]) == ()


def test_metrics_say_how_full_replicas_are_on_average():
    manager, _ = repacker([])
    assert metrics_of(manager.tally, [entry("a", 100), entry("b", 600)])["repack/kv_use_ratio"] == pytest.approx(0.35)


def test_the_roofline_bounds_a_destination_below_the_engines_own_limit():
    settings = {"model": {"path": "m", "dtype": "bfloat16"}, "data": {"path": "d"}}
    rollout = {"engine": {"max_running": 512}, "repack": {"flops_per_byte": 295}}
    assert repack_limits(LaminarConfig.model_validate(settings | {"rollout": rollout})).max_requests == 295
    rollout["engine"]["max_running"] = 100
    assert repack_limits(LaminarConfig.model_validate(settings | {"rollout": rollout})).max_requests == 100
