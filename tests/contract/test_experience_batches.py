"""Batches: take, fetch, publish, ack, and the groups that leave in between."""

import asyncio

import pytest

from laminar.errors import ExperienceError
from laminar.experience.buffer import MAX_REISSUES
from laminar.types import EvictionReason


async def test_take_is_all_or_none(make_run):
    run = await make_run()
    ready = await run.ready("0.0", groups=2)
    in_flight = (await run.claim("0.0", groups=1)).groups[0].group_id
    with pytest.raises(ExperienceError, match=f"group {in_flight} cannot be taken for step 1: it is in_flight"):
        await run.buffer.take(0, 1, [*ready, in_flight])
    with pytest.raises(ExperienceError, match="it is gone"):
        await run.buffer.take(0, 1, [*ready, "00000099"])
    with pytest.raises(ExperienceError, match="named twice"):
        await run.buffer.take(0, 1, [ready[0], ready[0]])
    assert [header.state for header in (await run.buffer.peek()).headers] == ["ready", "ready", "in_flight"]


async def test_step_takes_once_and_answers_the_same_groups_until_its_ack(make_run):
    run = await make_run()
    first, second, third = await run.ready("0.0", groups=3)
    assert await run.buffer.take(0, 1, [second, first]) == (second, first)
    assert await run.buffer.take(0, 1, [third]) == (second, first)
    await run.buffer.publish(0, 1)
    assert await run.buffer.take(0, 1, []) == (second, first)
    await run.buffer.ack(0, 1)
    with pytest.raises(ExperienceError, match="step 1 cannot take groups while number 1 is published"):
        await run.buffer.take(0, 1, [third])


async def test_empty_batch_and_a_step_out_of_turn_are_refused(make_run):
    run = await make_run()
    ready = await run.ready("0.0", groups=2)
    with pytest.raises(ExperienceError, match="an empty batch is never trained"):
        await run.buffer.take(0, 1, [])
    with pytest.raises(ExperienceError, match="step 2 cannot take groups while number 0 is published"):
        await run.buffer.take(0, 2, ready)


async def test_group_over_its_bound_cannot_be_taken(make_run):
    run = await make_run(max_staleness=1, prompts_per_step=1)
    old, first = await run.ready("0.0", groups=2)
    await run.step(1, [first])
    await run.step(2, await run.ready("0.1", groups=1))
    with pytest.raises(ExperienceError, match=f"group {old} has staleness 2, its bound is 1"):
        await run.buffer.take(0, 3, [old])


async def test_publish_counts_once_and_in_order(make_run):
    run = await make_run(group_size=2)
    await run.buffer.take(0, 1, await run.ready("0.0", groups=2))
    for _ in range(2):
        await run.buffer.publish(0, 1)
        assert (await run.buffer.counters()).trained == 4
    with pytest.raises(ExperienceError, match="number 3 cannot follow 1"):
        await run.buffer.publish(0, 3)


async def test_step_that_was_skipped_for_safety_still_publishes_its_number(make_run):
    run = await make_run()
    await run.buffer.publish(0, 1)
    assert (await run.buffer.peek()).published.number == 1


async def test_trainer_of_a_dead_lineage_changes_nothing(make_run):
    run = await make_run()
    ready = await run.ready("0.0", groups=2)
    await run.buffer.restore(1, 0)
    for request in (run.buffer.take(0, 1, ready), run.buffer.publish(0, 1), run.buffer.ack(0, 1)):
        with pytest.raises(ExperienceError, match="lineage"):
            await request
    assert [header.state for header in (await run.buffer.peek()).headers] == ["ready", "ready"]


async def test_payloads_stay_until_the_ack_of_a_published_step(make_run):
    run = await make_run()
    ready = await run.ready("0.0", groups=2)
    await run.buffer.take(0, 1, ready)
    with pytest.raises(ExperienceError, match="step 1 is not published yet"):
        await run.buffer.ack(0, 1)
    await run.buffer.publish(0, 1)
    assert [len(members) for members in await run.buffer.fetch(ready)] == [1, 1]
    await run.buffer.ack(0, 1)
    await run.buffer.ack(0, 1)
    with pytest.raises(ExperienceError, match=f"group {ready[0]} holds no trajectory"):
        await run.buffer.fetch(ready)
    left = [key async for key in run.store.client.scan_iter(match=run.store.key("*"), count=1000)]
    assert not [key for key in left if b"payload" in key or b"members" in key]


async def test_groups_are_fetched_in_the_given_order(make_run):
    run = await make_run(group_size=2, prompts_per_step=8)
    ready = await run.ready("0.0", groups=8)
    wanted = [ready[3], ready[0], ready[7]]
    fetched = await run.buffer.fetch(wanted)
    assert [[(t.group_id, t.member) for t in members] for members in fetched] == [[(g, 0), (g, 1)] for g in wanted]


async def test_payload_deleted_by_a_stranger_is_an_error_that_names_the_trajectory(make_run):
    run = await make_run()
    first, second = await run.ready("0.0", groups=2)
    assert await run.store.client.delete(run.store.key(f"payloads:{second}")) == 1
    with pytest.raises(ExperienceError, match=f"payload of trajectory {second}-000 is gone"):
        await run.buffer.fetch([first, second])


async def test_one_members_payload_deleted_by_a_stranger_is_an_error_too(make_run):
    run = await make_run(group_size=3)
    (group,) = await run.ready("0.0", groups=1)
    assert await run.store.client.hdel(run.store.key(f"payloads:{group}"), "1") == 1
    with pytest.raises(ExperienceError, match=f"payload of trajectory {group}-001 is gone"):
        await run.buffer.fetch([group])


async def test_large_payloads_have_keys_of_their_own_that_live_and_end_with_their_group(make_run, trajectory_maker):
    run = await make_run(group_size=3, prompts_per_step=2)
    kept, lost = [group.group_id for group in (await run.claim("0.0", groups=2)).groups]
    groups = {
        name: [trajectory_maker.play(name, m, *["0.0"] * (1 if m == 1 else 1000)) for m in range(3)] for name in (kept, lost)
    }
    await run.buffer.submit_many([*groups[kept], *groups[lost]], "w")
    assert await run.store.client.exists(*[run.store.key(f"payload:{kept}:{member}") for member in range(3)]) == 2
    assert await run.buffer.fetch([lost, kept]) == [tuple(groups[lost]), tuple(groups[kept])]
    await run.store.client.delete(run.store.key(f"payload:{lost}:2"))
    with pytest.raises(ExperienceError, match=f"payload of trajectory {lost}-002 is gone"):
        await run.buffer.fetch([lost])
    await run.buffer.evict([lost], EvictionReason.STALE, reissue=False)
    await run.step(1, [kept])
    left = [key async for key in run.store.client.scan_iter(match=run.store.key("*"), count=1000)]
    assert not [key for key in left if b"payload" in key or b"members" in key]
    assert (await run.buffer.peek()).reserved_bytes == 0


async def test_evicted_group_frees_its_slot_and_is_counted_by_reason(make_run):
    run = await make_run(max_staleness=0, group_size=2)
    (first, second) = [group.group_id for group in (await run.claim("0.0")).groups]
    assert await run.buffer.evict([first, "00000099"], EvictionReason.STALE, reissue=False) == (first,)
    assert await run.buffer.evict([first, second], EvictionReason.WAITED_TOO_LONG, reissue=False) == (second,)
    counters = await run.buffer.counters()
    assert (counters.evicted, counters.running) == ({"stale": 2, "waited_too_long": 2}, 0)
    assert len((await run.claim("0.0")).groups) == 2


async def test_group_that_leaves_a_taken_batch_keeps_its_slot_until_that_publish(make_run):
    run = await make_run(max_staleness=0)
    first, second = await run.ready("0.0")
    await run.buffer.take(0, 1, [first, second])
    await run.buffer.evict([first], EvictionReason.FULLY_MASKED, reissue=True)
    assert (await run.claim("0.0")).refused == "staleness"
    assert (await run.buffer.peek()).num_held == 1
    await run.buffer.publish(0, 1)
    assert (await run.buffer.counters()).trained == 1
    assert len((await run.claim("0.1")).groups) == 2


async def test_filtered_group_frees_its_slot_at_once_and_its_prompt_does_not_come_again(make_run):
    run = await make_run(max_staleness=0, num_prompts=3, max_epochs=1)
    first, _ = await run.ready("0.0")
    assert await run.buffer.filter([first]) == (first,)
    assert await run.buffer.filter([first]) == ()
    assert [group.prompt.prompt_id for group in (await run.claim("0.0")).groups] == ["2"]
    assert (await run.claim("0.0")).refused == "staleness"
    assert (await run.buffer.counters()).filtered == 1


async def test_group_in_flight_cannot_be_filtered(make_run):
    run = await make_run()
    ready = await run.ready("0.0", groups=1)
    in_flight = (await run.claim("0.0", groups=1)).groups[0].group_id
    with pytest.raises(ExperienceError, match=f"group {in_flight} is in flight"):
        await run.buffer.filter([*ready, in_flight])
    assert len((await run.buffer.peek()).headers) == 2


async def test_dropped_prompt_is_issued_again_before_new_ones_as_a_new_group(make_run):
    run = await make_run()
    claim = await run.claim("0.0", groups=3)
    await run.buffer.evict([claim.groups[1].group_id], EvictionReason.STALE, reissue=True)
    again = (await run.claim("0.0", groups=2)).groups
    assert [(group.prompt.prompt_id, group.admission, group.attempt) for group in again] == [("1", 3, 1), ("3", 4, 1)]


async def test_dropped_prompt_is_issued_again_a_bounded_number_of_times(make_run):
    run = await make_run(num_prompts=1, max_epochs=1)
    issues = 0
    while groups := (await run.claim("0.0", groups=1)).groups:
        issues += 1
        await run.buffer.evict([groups[0].group_id], EvictionReason.STALE, reissue=True)
    assert issues == 1 + MAX_REISSUES
    counters = await run.buffer.counters()
    assert (counters.reissued, counters.evicted) == (MAX_REISSUES, {"stale": 1 + MAX_REISSUES})
    assert (await run.buffer.peek()).end_of_data


async def test_informative_group_beyond_the_batch_is_kept_for_the_next_step_as_in_case_d18b(make_run):
    run = await make_run(prompts_per_step=3, max_staleness=2)
    ready = await run.ready("0.0", groups=8)
    uninformative = [*ready[1:4], ready[7]]
    await run.buffer.filter(uninformative)
    await run.step(1, [group for group in ready if group not in uninformative][:3])
    (header,) = (await run.buffer.peek()).headers
    assert (header.group_id, header.state, header.oldest) == (ready[6], "ready", 0)


async def test_snapshot_lists_groups_in_order_of_admission_with_their_owners(make_run):
    run = await make_run(prompts_per_step=8)
    await run.claim("0.0", groups=5, worker="a")
    await run.claim("0.0", groups=6, worker="b")
    headers = (await run.buffer.peek()).headers
    assert [header.admission for header in headers] == list(range(11))
    assert [header.owner for header in headers] == ["a"] * 5 + ["b"] * 6


async def test_two_trainers_that_race_for_a_step_get_the_same_groups(make_run):
    run = await make_run()
    ready = await run.ready("0.0", groups=4)
    taken = await asyncio.gather(run.buffer.take(0, 1, ready[:2]), run.buffer.take(0, 1, ready[2:]))
    assert taken[0] == taken[1]
    assert (await run.buffer.counters()).taken == 2
