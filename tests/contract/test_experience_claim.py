"""Claims: admission by the staleness rule and by bytes, leases, order of prompts, attempts."""

import pytest

from laminar.errors import ConfigError, ExperienceError
from laminar.experience.answers import Frontier
from laminar.policies.samplers import fifo
from laminar.policies.staleness import plan_batch
from laminar.seeds import prompt_order
from laminar.types import EvictionReason, WeightVersion

D01 = {"prompts_per_step": 4, "max_staleness": 2, "num_prompts": 500}


async def free_slots(run, engine):
    return len((await run.claim(engine)).groups)


async def resumed(make_run, number=37):
    run = await make_run(**D01, opened=False)
    await run.buffer.restore(1, number, Frontier(number=number))
    return run


async def test_case_d01_fresh_start_has_12_slots_and_then_none(make_run):
    run = await make_run(**D01)
    assert await free_slots(run, "0.0") == 12
    assert (await run.claim("0.0")).refused == "staleness"


async def test_case_d01_resumed_run_has_12_slots_not_160(make_run):
    run = await resumed(make_run)
    assert await free_slots(run, "1.37") == 12


async def test_case_d01_resumed_run_with_5_admitted_has_7_slots(make_run):
    run = await resumed(make_run)
    await run.claim("1.37", groups=5)
    assert await free_slots(run, "1.37") == 7


async def test_case_d01_resumed_run_after_a_step_with_1_outstanding_has_11_slots(make_run):
    run = await resumed(make_run)
    trained = await run.ready("1.37", groups=4)
    await run.claim("1.37", groups=1)
    await run.step(38, trained, lineage=1)
    assert await free_slots(run, "1.38") == 11


async def test_case_d01_resumed_run_that_kept_3_buffered_groups_has_9_slots(make_run):
    run = await make_run(**D01)
    await run.ready("0.0", groups=3)
    report = await run.buffer.restore(1, 0)
    assert (report.kept, report.orphaned) == (3, 0)
    assert await free_slots(run, "1.0") == 9


async def test_case_d01_filtered_group_frees_its_slot(make_run):
    run = await make_run(**D01)
    ready = await run.ready("0.0", groups=4)
    await run.buffer.filter(ready[:1])
    assert await free_slots(run, "0.0") == 9


async def test_case_d01_fast_producer_never_exceeds_the_bound_after_a_resume(make_run):
    run = await resumed(make_run)
    worst = 0
    for number in range(37, 47):
        await run.ready(f"1.{number}")
        snapshot = await run.buffer.peek()
        plan = plan_batch(
            snapshot.headers, trained_on=number, prompts_per_step=4, max_staleness=2, order=fifo, end_of_data=False
        )
        oldest = {header.group_id: header.oldest for header in snapshot.headers}
        worst = max([worst, *(number - oldest[group_id] for group_id in plan.chosen)])
        await run.step(number + 1, plan.chosen, lineage=1)
    assert worst == 2


async def test_lagging_engine_is_granted_one_batch_less_for_each_version_it_lags(make_run):
    run = await make_run(**D01)
    await run.step(1, await run.ready("0.0", groups=4))
    assert await free_slots(run, "0.0") == 8
    assert await free_slots(run, "0.1") == 4


async def test_unbounded_staleness_is_limited_by_bytes_only(make_run):
    run = await make_run(max_staleness=None, max_bytes=50_000, bytes_per_group=1000)
    claim = await run.claim("0.0")
    assert (len(claim.groups), claim.refused) == (50, "bytes")
    for _ in range(2):
        assert (await run.claim("0.0")).refused == "bytes"
    assert (await run.buffer.counters()).refused_claims == {"bytes": 2}


async def test_reserved_bytes_become_the_real_size_when_members_arrive(make_run, trajectory_maker):
    run = await make_run(max_bytes=50_000, bytes_per_group=1000, group_size=2, max_staleness=None)
    group = (await run.claim("0.0", groups=1)).groups[0].group_id
    assert (await run.buffer.peek()).reserved_bytes == 1000
    await run.buffer.submit(trajectory_maker.play(group, 0, "0.0"), "w")
    half = await run.buffer.peek()
    assert half.reserved_bytes == half.headers[0].num_bytes + 500
    await run.buffer.submit(trajectory_maker.play(group, 1, "0.0"), "w")
    full = await run.buffer.peek()
    assert full.reserved_bytes == full.headers[0].num_bytes == 2 * half.headers[0].num_bytes
    await run.step(1, [group])
    assert (await run.buffer.peek()).reserved_bytes == 0


async def test_too_small_an_estimate_of_a_groups_bytes_does_not_stop_the_run(make_run):
    run = await make_run(max_bytes=20, bytes_per_group=10, prompts_per_step=2)
    first = await run.ready("0.0")
    assert len(first) == 2
    assert (await run.claim("0.0")).refused == "bytes"
    await run.step(1, first)
    assert len(await run.ready("0.1")) == 2


async def test_limit_below_one_batch_is_refused(make_run):
    with pytest.raises(ConfigError, match=r"max_bytes 1999 .* set it to 2000 or more"):
        await make_run(max_bytes=1999, bytes_per_group=1000, prompts_per_step=2)


async def test_nothing_is_claimed_before_a_lineage_is_open(make_run):
    run = await make_run(opened=False)
    claim = await run.claim("0.0")
    assert (claim.groups, claim.refused) == ((), "not_ready")
    assert (await run.buffer.counters()).refused_claims == {"not_ready": 1}


async def test_engine_of_a_dead_lineage_is_refused(make_run):
    run = await make_run()
    await run.buffer.restore(1, 0)
    assert (await run.claim("0.0")).refused == "old_lineage"
    assert (await run.claim("2.0")).refused == "not_ready"


async def test_engine_ahead_of_the_published_number_is_an_error(make_run):
    run = await make_run()
    with pytest.raises(ExperienceError, match="engine holds number 1, but only 0 is published"):
        await run.claim("0.1")


async def test_prompts_come_in_the_seeded_order_of_each_epoch_and_then_end(make_run):
    run = await make_run(num_prompts=5, shuffle=True, data_seed=3, max_epochs=2, max_staleness=None)
    claims = [await run.claim("0.0", groups=7) for _ in range(3)]
    groups = [group for claim in claims for group in claim.groups]
    played = [int(group.prompt.prompt_id) for group in groups]
    assert played == [*prompt_order(3, 0, 5, True), *prompt_order(3, 1, 5, True)]
    assert [group.admission for group in groups] == list(range(10))
    assert claims[-1].refused == "end_of_data"
    assert (await run.buffer.peek()).end_of_data


async def test_of_many_short_epochs_only_the_last_order_is_kept(make_run):
    run = await make_run(num_prompts=2, shuffle=True, max_staleness=None)
    for epoch in range(5):
        claim = await run.claim("0.0", groups=2)
        assert [int(group.prompt.prompt_id) for group in claim.groups] == [*prompt_order(0, epoch, 2, True)]
    store = run.pool._store
    assert [key async for key in store.client.scan_iter(match=store.key("order:*"))] == [store.key("order:4").encode()]


async def test_repeated_claim_gets_the_same_answer(make_run):
    run = await make_run()
    first = await run.pool.claim("w", WeightVersion(0, 0), 2, 60, request_id="r1")
    again = await run.pool.claim("w", WeightVersion(0, 0), 2, 60, request_id="r1")
    assert again == first
    assert (await run.buffer.counters()).admitted == 2


async def test_expired_group_keeps_its_slot_and_goes_first_with_only_its_missing_members(make_run, trajectory_maker):
    run = await make_run(group_size=3, max_staleness=1)
    first = await run.claim("0.0", groups=2)
    lost = first.groups[0].group_id
    await run.buffer.submit(trajectory_maker.play(lost, 1, "0.0"), "w")
    await run.pool.reap(ahead_seconds=3600)
    assert (await run.buffer.peek()).headers[0].owner == ""
    again = await run.claim("0.0", groups=1, worker="v")
    assert [(group.group_id, group.members, group.attempt) for group in again.groups] == [(lost, (0, 2), 2)]
    assert await run.pool.renew("w", [lost], 60) == (lost,)


async def test_lease_ends_by_the_servers_clock(make_run):
    run = await make_run(max_staleness=0)
    claim = await run.claim("0.0", worker="w", lease_seconds=0.001)
    again = claim
    for _ in range(1000):
        again = await run.claim("0.0", worker="v")
        if again.groups:
            break
    assert [group.group_id for group in again.groups] == [group.group_id for group in claim.groups]


async def test_older_engine_may_not_take_over_what_a_newer_one_played_when_slots_are_full(make_run):
    run = await make_run(max_staleness=1, prompts_per_step=2)
    await run.step(1, await run.ready("0.0", groups=2))
    assert len((await run.claim("0.1", groups=3)).groups) == 3
    await run.pool.reap(ahead_seconds=3600)
    assert (await run.claim("0.0", worker="v")).refused == "staleness"  # its 2 slots are filled by the other 2 groups
    assert len((await run.claim("0.1", groups=3, worker="v")).groups) == 3


async def test_older_engine_may_take_over_when_the_group_would_be_admitted_anew(make_run):
    run = await make_run(max_staleness=1, prompts_per_step=2)
    await run.step(1, await run.ready("0.0", groups=2))
    (group,) = (await run.claim("0.1", groups=1)).groups
    await run.pool.reap(ahead_seconds=3600)
    (again,) = (await run.claim("0.0", groups=1, worker="v")).groups
    assert again.group_id == group.group_id
    assert (await run.buffer.peek()).headers[0].oldest == 0


async def test_group_is_given_up_visibly_after_its_last_attempt(make_run, trajectory_maker):
    run = await make_run(group_size=3, max_attempts=2, min_group_size=2)
    group = (await run.claim("0.0", groups=1)).groups[0].group_id
    await run.buffer.submit(trajectory_maker.play(group, 0, "0.0"), "w")
    await run.pool.reap(ahead_seconds=3600)
    assert (await run.claim("0.0", groups=1)).groups[0].attempt == 2
    await run.pool.reap(ahead_seconds=3600)
    counters = await run.buffer.counters()
    assert counters.failed == {"given_up": 2, "too_few_siblings": 1}
    assert (await run.buffer.peek()).headers == ()
    assert [event.kind for event in await run.store.events()] == ["given_up", "failed"]


async def test_given_up_members_leave_a_trainable_group_if_enough_are_good(make_run, trajectory_maker):
    run = await make_run(group_size=3, max_attempts=1, min_group_size=2)
    group = (await run.claim("0.0", groups=1)).groups[0].group_id
    for member in (0, 2):
        await run.buffer.submit(trajectory_maker.play(group, member, "0.0"), "w")
    await run.pool.reap(ahead_seconds=3600)
    assert [header.state for header in (await run.buffer.peek()).headers] == ["ready"]
    ((first, second),) = await run.buffer.fetch([group])
    assert (first.member, second.member) == (0, 2)


async def test_group_given_back_is_free_at_once_and_its_attempt_does_not_count(make_run):
    run = await make_run(max_staleness=0)
    claim = await run.claim("0.0", worker="w")
    await run.pool.give_back("v", [group.group_id for group in claim.groups])
    assert (await run.claim("0.0", worker="v")).groups == ()
    await run.pool.give_back("w", [group.group_id for group in claim.groups])
    again = await run.claim("0.0", worker="v")
    assert [(group.group_id, group.attempt) for group in again.groups] == [(g.group_id, 1) for g in claim.groups]


async def test_heartbeat_keeps_the_listed_groups_only(make_run):
    run = await make_run(max_staleness=0)
    kept, lost = [group.group_id for group in (await run.claim("0.0", lease_seconds=5)).groups]
    assert await run.pool.renew("w", [kept], 1000) == ()
    await run.pool.reap(ahead_seconds=100)
    again = await run.claim("0.0", worker="v")
    assert [group.group_id for group in again.groups] == [lost]


async def test_late_heartbeat_wins_a_group_back_that_nobody_has_claimed(make_run):
    run = await make_run(max_staleness=0)
    ids = [group.group_id for group in (await run.claim("0.0")).groups]
    await run.pool.reap(ahead_seconds=3600)
    assert await run.pool.renew("v", ids, 60) == tuple(ids)
    assert await run.pool.renew("w", ids, 60) == ()
    assert (await run.claim("0.0", worker="v")).groups == ()


async def test_heartbeat_raises_the_oldest_number_to_what_the_worker_knows(make_run):
    run = await make_run()
    await run.step(1, await run.ready("0.0", groups=2))
    group = (await run.claim("0.0", groups=1)).groups[0].group_id
    await run.pool.renew("w", [group], 60, known={group: (1, 1)})
    (header,) = (await run.buffer.peek()).headers
    assert (header.oldest, header.newest) == (1, 1)


async def test_evicted_group_is_reported_lost_at_the_next_heartbeat(make_run):
    run = await make_run()
    group = (await run.claim("0.0", groups=1)).groups[0].group_id
    await run.buffer.evict([group], EvictionReason.STALE, reissue=False)
    assert await run.pool.renew("w", [group], 60) == (group,)


async def test_resume_with_other_data_is_refused(make_run):
    run = await make_run(num_prompts=100)
    with pytest.raises(ConfigError, match="other data"):
        await make_run(num_prompts=99, store=run.store)


async def test_claim_waits_where_there_is_no_memory_for_the_order_of_prompts(make_run):
    run = await make_run()
    await run.claim("0.0", groups=1)
    await run.store.client.delete(run.store.key("order:0"))  # as it goes by itself after a while
    before = (await run.store.client.config_get("maxmemory"))["maxmemory"]
    await run.store.client.config_set("maxmemory", 1)
    try:
        claim = await run.claim("0.0", groups=1)
        assert (claim.groups, claim.refused) == ((), "bytes")
    finally:
        await run.store.client.config_set("maxmemory", before)
    assert len((await run.claim("0.0", groups=1)).groups) == 1


async def test_bound_that_is_larger_than_any_number_of_versions_is_kept(make_run):
    run = await make_run(max_staleness=10**20)
    assert len((await run.claim("0.0", groups=50)).groups) == 50
    assert (await run.buffer.peek()).headers[0].max_staleness == 2**53
