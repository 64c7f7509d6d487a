"""Siblings that a reward compares are handed in all or none, on a real server, whoever dies meanwhile."""

import asyncio
from dataclasses import replace
from functools import partial

from laminar.types import Chain, WeightVersion, given, sampled
from rollout.siblings import Siblings


def by_member(trajectories):
    """A group reward: 10 for member 0, 11 for member 1, ..."""
    return [replace(t, reward=10.0 + t.member, reward_terms={"rank": 10.0 + t.member}) for t in trajectories]


async def judge(trajectories):
    return by_member(trajectories)


def siblings_of(run, group, worker):
    return Siblings(len(group.members), partial(run.buffer.submit_many, worker=worker, together=True), judge)


async def test_a_worker_that_dies_while_members_wait_leaves_all_of_them_to_the_next(make_run, trajectory_maker):
    run = await make_run(group_size=3)
    (group,) = (await run.claim(groups=1, worker="first")).groups
    first = siblings_of(run, group, "first")
    waiting = [asyncio.create_task(first.hand_in(trajectory_maker.play(group.group_id, member, "0.0"))) for member in (0, 1)]
    await asyncio.sleep(0)
    await run.pool.reap(ahead_seconds=3600)
    (again,) = (await run.claim(groups=1, worker="second")).groups
    assert again.members == (0, 1, 2)

    second = siblings_of(run, again, "second")
    played = [trajectory_maker.play(group.group_id, member, "0.0", attempt=2) for member in again.members]
    ended = await asyncio.gather(*[second.hand_in(trajectory) for trajectory in played])
    assert [outcome for _, outcome in ended] == ["accepted"] * 3

    late = await first.hand_in(trajectory_maker.play(group.group_id, 2, "0.0"))  # it was not dead after all
    assert [late[1], *[(await task)[1] for task in waiting]] == ["duplicate"] * 3
    (stored,) = await run.buffer.fetch([group.group_id])
    assert list(stored) == by_member(played)
    assert (await run.buffer.counters()).is_balanced


async def test_siblings_travel_in_one_script_call_however_long_they_are(make_run, trajectory_maker):
    run = await make_run(group_size=3)
    (group,) = (await run.claim(groups=1)).groups
    ids = list(range(100_000))
    chain = Chain((given([1]), sampled(ids, [-1.0] * len(ids), WeightVersion(0, 0))))  # 800 kB each
    played = [replace(trajectory_maker.play(group.group_id, member, "0.0"), chains=(chain,)) for member in range(3)]
    await run.store.client.config_resetstat()
    assert await run.buffer.submit_many(played, "w", together=True) == ["accepted"] * 3
    calls = (await run.store.client.info("commandstats"))["cmdstat_evalsha"]
    assert calls["calls"] - calls["rejected_calls"] - calls["failed_calls"] == 1
    assert len((await run.buffer.fetch([group.group_id]))[0]) == 3
