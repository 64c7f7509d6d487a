"""What a failed member does to its group: refill, shrink or drop, on a real server."""

import pytest

from laminar.types import FailureKind


@pytest.fixture
async def group_of(make_run, trajectory_maker):
    """A run with groups of four, and one claimed group; `end(member)` hands in a failure, or a success."""

    async def make(group_failure, **settings):
        run = await make_run(group_size=4, min_group_size=2, group_failure=group_failure, **settings)
        (group,) = (await run.claim(groups=1)).groups

        async def end(member, good=False, kind=FailureKind.TIMEOUT, attempt=1):
            make_one = trajectory_maker.play if good else trajectory_maker.break_down
            trajectory = make_one(group.group_id, member, "0.0") if good else make_one(group.group_id, member, kind)
            outcome = await run.buffer.submit(trajectory, "w")
            assert (await run.buffer.counters()).is_balanced
            return outcome

        return run, group, end

    return make


async def kinds(run):
    return [event.kind for event in await run.store.events()]


async def test_shrink_trains_on_the_good_members(group_of):
    run, group, end = await group_of("shrink")
    outcomes = [await end(0), await end(1, good=True), await end(2, good=True), await end(3)]
    assert outcomes == ["accepted"] * 4
    (members,) = await run.buffer.fetch([group.group_id])
    assert [t.member for t in members] == [1, 2]
    assert (await run.buffer.counters()).failed == {"timeout": 2}


async def test_shrink_fails_the_group_as_soon_as_too_few_can_be_good(group_of):
    run, group, end = await group_of("shrink")
    await end(0, good=True)
    await end(1)
    await end(2)
    assert [h.group_id for h in (await run.buffer.peek()).headers] == [group.group_id]
    await end(3)
    assert (await run.buffer.peek()).headers == ()
    run, _, end = await group_of("shrink")
    await end(0)
    await end(1)
    await end(2)  # one is still played, two are needed
    assert (await run.buffer.peek()).headers == ()
    assert (await run.buffer.counters()).failed == {"timeout": 3, "too_few_siblings": 1}
    assert await end(3, good=True) == "refused_unknown"


async def test_drop_fails_the_group_at_the_first_failure_and_says_so(group_of):
    run, group, end = await group_of("drop")
    await end(0, good=True)
    assert await end(1) == "accepted"
    snapshot = await run.buffer.peek()
    assert (snapshot.headers, snapshot.reserved_bytes) == ((), 0)
    assert snapshot.counters.failed == {"timeout": 1, "too_few_siblings": 3}
    assert await end(2, good=True) == "refused_unknown"
    assert (await run.store.events())[-1].group_id == group.group_id
    assert await kinds(run) == ["failure", "failed"]


async def test_drop_also_fails_a_group_whose_last_lease_ended(group_of):
    run, _, end = await group_of("drop", max_attempts=1)
    await end(0, good=True)
    await run.pool.reap(ahead_seconds=3600)
    assert (await run.buffer.peek()).headers == ()
    assert (await run.buffer.counters()).failed == {"given_up": 3, "too_few_siblings": 1}


async def test_refill_has_the_member_played_again_as_often_as_there_are_members_then_shrinks(group_of):
    run, group, end = await group_of("refill")
    for member in (1, 2, 3):
        await end(member, good=True)
    assert [await end(0) for _ in range(5)] == ["replay"] * 4 + ["accepted"]
    counters = await run.buffer.counters()
    assert (counters.refilled, counters.failed, counters.buffered) == (4, {"timeout": 1}, 3)
    assert [t.member for t in (await run.buffer.fetch([group.group_id]))[0]] == [1, 2, 3]


async def test_a_refilled_member_completes_its_group(group_of):
    run, group, end = await group_of("refill")
    for member in (1, 2, 3):
        await end(member, good=True)
    assert await end(0) == "replay"
    assert (await run.buffer.counters()).running == 1
    assert await end(0, good=True) == "accepted"
    assert len((await run.buffer.fetch([group.group_id]))[0]) == 4
    assert (await run.buffer.counters()).num_failed == 0


async def test_another_worker_plays_a_refilled_member_if_the_first_is_lost(group_of, trajectory_maker):
    run, group, end = await group_of("refill")
    for member in (1, 2, 3):
        await end(member, good=True)
    assert await end(0) == "replay"
    await run.pool.reap(ahead_seconds=3600)
    claim = await run.claim(groups=1, worker="other")
    assert [(g.group_id, g.members) for g in claim.groups] == [(group.group_id, (0,))]
    assert await run.buffer.submit(trajectory_maker.play(group.group_id, 0, "0.0"), "other") == "accepted"


async def test_a_bug_of_the_user_is_not_played_again(group_of):
    run, _, end = await group_of("refill")
    assert await end(0, kind=FailureKind.USER_BUG) == "accepted"
    assert (await run.buffer.counters()).refilled == 0


async def test_a_repeated_submit_of_a_failure_refills_once(group_of, trajectory_maker):
    run, group, _ = await group_of("refill")
    arguments = (group.group_id, 0, 1, "w", False, "timeout", "", 0, 0, 0, 0, 0)
    await run.store.load("submit", repeated=True)
    command = run.store.batch("submit", [("one-request", arguments, b"")])
    answers = [await run.store.client.execute_command(*command) for _ in range(2)]
    assert answers[0] == answers[1]
    assert (await run.buffer.counters()).refilled == 1
