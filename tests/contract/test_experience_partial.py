"""The partial pool: appended once, owned by the newest claim, bounded, gone with the member."""

import numpy as np
import pytest

from laminar.experience.partial import AppendOutcome, Partial, PartialPiece, PartialPool, PartialTurn
from laminar.types import EvictionReason, FinishReason, WeightVersion, sampled


def turn(ids, number=0, index=0, masked=0, reason=None):
    logprobs = [-token / 8 for token in ids]
    segments = (sampled(ids, logprobs, WeightVersion(0, number), masked),) if ids else ()
    return PartialTurn(index, 77 + index, segments, reason)


def piece(group, offset, *turns, member=0, attempt=0):
    return PartialPiece(group.group_id, member, attempt, group.claim, offset, turns)


async def claim_one(run, engine="0.0", worker="w"):
    return (await run.claim(engine, groups=1, worker=worker)).groups[0]


async def hand_over(run, engine="0.0", worker="v"):
    await run.pool.reap(ahead_seconds=3600)
    return await claim_one(run, engine, worker)


async def keys_of_partials(run):
    return [key async for key in run.store.client.scan_iter(match=run.store.key("partials:*"), count=1000)]


@pytest.fixture
def pool(store):
    return PartialPool(store)


async def test_a_new_owner_gets_all_tokens_logprobs_and_versions_in_order(make_run, store, pool):
    run = await make_run(store=store, group_size=2)
    await run.step(1, await run.ready("0.0", groups=2))
    group = await claim_one(run, "0.1")
    first = PartialTurn(0, 77, (*turn([11, 12]).segments, *turn([13], 1, masked=1).segments))
    end = turn([14], 1, reason=FinishReason.STOP)
    assert await pool.append([piece(group, 0, first), piece(group, 3, end, turn([21, 22], 1, index=1))]) == ["appended"] * 2
    heir = await hand_over(run, "0.1")
    assert (heir.group_id, heir.claim, heir.members) == (group.group_id, 2, (0, 1))
    left = await pool.adopt(heir.group_id, heir.claim)
    assert left == {
        0: Partial(
            attempt=0,
            turns=(
                PartialTurn(
                    0,
                    77,
                    (sampled([11, 12], [-11 / 8, -12 / 8], WeightVersion(0, 0)),
                     sampled([13, 14], [-13 / 8, -14 / 8], WeightVersion(0, 1), 1)),
                    FinishReason.STOP,
                ),
                turn([21, 22], 1, index=1),
            ),
        )
    }  # fmt: skip
    assert left[0].num_tokens == 6


async def test_a_repeated_append_changes_nothing_and_a_gap_is_refused(make_run, store, pool):
    run = await make_run(store=store)
    group = await claim_one(run)
    for _ in range(3):
        assert await pool.append([piece(group, 0, turn([1, 2]))]) == [AppendOutcome.APPENDED]
    assert await pool.append([piece(group, 3, turn([9]))]) == [AppendOutcome.LOST]
    assert await pool.append([piece(group, 1, turn([2, 3]))]) == [AppendOutcome.LOST]
    assert await pool.append([piece(group, 2, turn([3]))]) == [AppendOutcome.APPENDED]
    heir = await hand_over(run)
    (left,) = (await pool.adopt(heir.group_id, heir.claim)).values()
    assert left.turns[0].segments[0].token_ids.tolist() == [1, 2, 3]


async def test_only_the_holder_of_the_newest_claim_appends_and_adopts(make_run, store, pool):
    run = await make_run(store=store)
    group = await claim_one(run)
    await pool.append([piece(group, 0, turn([1, 2]))])
    await run.pool.reap(ahead_seconds=3600)
    assert await pool.append([piece(group, 2, turn([3]))]) == ["appended"]  # nobody else has claimed it yet
    heir = await claim_one(run, worker="w")  # the same name: a worker that was started again
    assert await pool.append([piece(group, 3, turn([4]))]) == ["lost"]
    assert await pool.adopt(group.group_id, group.claim) == {}
    assert (await pool.adopt(heir.group_id, heir.claim))[0].num_tokens == 3
    assert await pool.append([piece(heir, 3, turn([5]))]) == ["appended"]
    last = await hand_over(run, worker="w")
    (left,) = (await pool.adopt(last.group_id, last.claim)).values()
    assert np.concatenate([s.token_ids for s in left.turns[0].segments]).tolist() == [1, 2, 3, 5]


async def test_a_later_attempt_replaces_an_earlier_one(make_run, store, pool):
    run = await make_run(store=store)
    group = await claim_one(run)
    await pool.append([piece(group, 0, turn([1, 2]))])
    assert await pool.append([piece(group, 0, turn([7]), attempt=1)]) == ["appended"]
    assert await pool.append([piece(group, 2, turn([3]))]) == ["lost"]
    heir = await hand_over(run)
    (left,) = (await pool.adopt(heir.group_id, heir.claim)).values()
    assert (left.attempt, left.num_tokens) == (1, 1)


async def test_a_partial_is_gone_with_its_members_submit_and_takes_no_more(make_run, store, pool, trajectory_maker):
    run = await make_run(store=store, group_size=2)
    group = await claim_one(run)
    for member in (0, 1):
        await pool.append([piece(group, 0, turn([1, 2]), member=member), piece(group, 2, turn([3]), member=member)])
    await run.buffer.submit(trajectory_maker.play(group.group_id, 0, "0.0"), "w")
    assert await pool.append([piece(group, 3, turn([4]))]) == ["lost"]
    heir = await hand_over(run)
    assert list(await pool.adopt(heir.group_id, heir.claim)) == [1]
    await run.buffer.submit(trajectory_maker.play(group.group_id, 1, "0.0"), "v")
    assert await keys_of_partials(run) == []


@pytest.mark.parametrize("end", ["evict", "restore", "give_up"])
async def test_partials_are_gone_with_their_group(make_run, store, pool, end):
    run = await make_run(store=store, max_attempts=1)
    group = await claim_one(run)
    await pool.append([piece(group, 0, turn([1, 2]))])
    assert len(await keys_of_partials(run)) == 1
    if end == "evict":
        await run.buffer.evict([group.group_id], EvictionReason.STALE, reissue=True)
    elif end == "restore":
        await run.buffer.restore(1, 0)
    else:
        await run.pool.reap(ahead_seconds=3600)
    assert await keys_of_partials(run) == []
    assert await pool.append([piece(group, 2, turn([3]))]) == ["lost"]


async def test_a_partial_never_takes_more_than_its_members_share_of_the_reserved_bytes(make_run, store, pool):
    run = await make_run(store=store, group_size=2, bytes_per_group=1000)
    group = await claim_one(run)
    outcomes = [(await pool.append([piece(group, 10 * i, turn([5] * 10))]))[0] for i in range(10)]
    assert outcomes[:3] == ["appended"] * 3
    assert AppendOutcome.FULL in outcomes
    stored = await store.client.hgetall(store.key(f"partials:{group.group_id}"))
    assert sum(len(chunk) for field, chunk in stored.items() if b":" in field) <= 500
    assert (await run.buffer.peek()).reserved_bytes == 1000


async def test_an_older_engine_takes_over_what_is_older_still(make_run, store, pool):
    # Slots: K = 1, B = 2, published 1, so an engine on number 0 has (1 + 1 - 1) * 2 = 2, filled by the other two groups.
    run = await make_run(store=store, max_staleness=1, prompts_per_step=2)
    await run.step(1, await run.ready("0.0", groups=2))
    groups = (await run.claim("0.1", groups=3)).groups
    await run.pool.reap(ahead_seconds=3600)
    assert (await run.claim("0.0", worker="v")).refused == "staleness"
    first = await claim_one(run, "0.1")
    assert first.group_id == groups[0].group_id
    await pool.append([piece(first, 0, turn([1, 2], 0))])  # as if number 0 had sampled its head
    await run.pool.reap(ahead_seconds=3600)
    (heir,) = (await run.claim("0.0", groups=5, worker="v")).groups
    assert heir.group_id == first.group_id
    header = (await run.buffer.peek()).headers[0]
    assert (header.oldest, header.newest) == (0, 0)


async def test_a_taken_over_group_is_as_old_as_its_oldest_surviving_token(make_run, store, pool):
    run = await make_run(store=store, max_staleness=3, group_size=2)
    await run.step(1, await run.ready("0.0", groups=2))
    group = await claim_one(run, "0.0")
    await pool.append([piece(group, 0, turn([1, 2], 0))])
    heir = await hand_over(run, "0.1")
    assert heir.group_id == group.group_id
    header = (await run.buffer.peek()).headers[0]
    assert (header.oldest, header.newest) == (0, 1)


async def test_a_server_without_memory_takes_no_appends_and_says_so(make_run, store, pool):
    run = await make_run(store=store)
    group = await claim_one(run)
    await pool.append([piece(group, 0, turn([1]))])
    await store.client.config_set("maxmemory", 1)
    try:
        assert await pool.append([piece(group, 1, turn([2]))]) == [AppendOutcome.NO_MEMORY]
    finally:
        await store.client.config_set("maxmemory", 0)
    assert await pool.append([piece(group, 1, turn([2]))]) == [AppendOutcome.APPENDED]


async def test_scripts_are_loaded_again_when_the_server_has_forgotten_them(make_run, store, pool):
    run = await make_run(store=store)
    group = await claim_one(run)
    await store.client.script_flush()
    assert await pool.append([piece(group, 0, turn([1])), piece(group, 1, turn([2]))]) == ["appended"] * 2


async def test_what_is_dropped_while_it_is_played_counts_with_the_tokens_it_had_put_by(make_run, store, pool):
    run = await make_run(store=store, group_size=3, bytes_per_group=10_000)
    group = await claim_one(run)
    await pool.append([piece(group, 0, turn(range(1, 71))), piece(group, 0, turn([5]), member=2)])
    await run.buffer.evict([group.group_id], EvictionReason.STALE, reissue=False)
    assert (await run.buffer.counters()).dropped_lengths == {"64": 1, "128": 1, "unfinished": 1}
