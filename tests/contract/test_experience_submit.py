"""Submits: once, by whom, with what; and what a full server does to them."""

import pytest
import redis

from laminar.errors import ExperienceError
from laminar.experience.answers import SubmitOutcome
from laminar.experience.store import ExperienceStore
from laminar.types import EvictionReason, FailureKind


async def claim_one(run, engine="0.0"):
    return (await run.claim(engine, groups=1)).groups[0].group_id


async def payload_keys(run):
    return [key async for key in run.store.client.scan_iter(match=run.store.key("payloads:*"), count=1000)]


async def test_group_is_ready_when_its_last_member_is_done(make_run, trajectory_maker):
    run = await make_run(group_size=2)
    group = await claim_one(run)
    assert await run.buffer.submit(trajectory_maker.play(group, 1, "0.0"), "w") is SubmitOutcome.ACCEPTED
    assert (await run.buffer.peek()).headers[0].state == "in_flight"
    assert await run.buffer.submit(trajectory_maker.play(group, 0, "0.0"), "w") is SubmitOutcome.ACCEPTED
    assert (await run.buffer.peek()).headers[0].state == "ready"


async def test_what_was_submitted_comes_back_in_member_order(make_run, trajectory_maker):
    run = await make_run(group_size=3)
    group = await claim_one(run)
    played = [trajectory_maker.play(group, member, "0.0", reward=float(member)) for member in (2, 0, 1)]
    await run.buffer.submit_many(played, "w")
    assert await run.buffer.fetch([group]) == [tuple(sorted(played, key=lambda trajectory: trajectory.member))]


async def test_second_submit_is_a_duplicate_and_cannot_overwrite_the_first(make_run, trajectory_maker):
    run = await make_run()
    group = await claim_one(run)
    first = trajectory_maker.play(group, 0, "0.0", reward=1.0)
    assert await run.buffer.submit(first, "w") is SubmitOutcome.ACCEPTED
    assert await run.buffer.submit(first, "w") is SubmitOutcome.DUPLICATE
    other = trajectory_maker.play(group, 0, "0.0", reward=0.0, attempt=2)
    assert await run.buffer.submit(other, "v") is SubmitOutcome.DUPLICATE
    assert await run.buffer.fetch([group]) == [(first,)]
    assert len(await payload_keys(run)) == 1


async def test_unknown_group_is_refused_and_leaves_no_payload(make_run, trajectory_maker):
    run = await make_run()
    outcome = await run.buffer.submit(trajectory_maker.play("00000099", 0, "0.0"), "w")
    assert outcome is SubmitOutcome.REFUSED_UNKNOWN
    assert await payload_keys(run) == []


async def test_large_payload_is_staged_for_its_script_alone(make_run, trajectory_maker):
    run = await make_run()
    group, client = await claim_one(run), run.store.client
    first, other = (trajectory_maker.play(group, 0, *["0.0"] * 1000, reward=reward) for reward in (1.0, 0.0))
    assert await run.buffer.submit(first, "w") is SubmitOutcome.ACCEPTED
    assert await run.buffer.submit(other, "w") is SubmitOutcome.DUPLICATE
    unknown = trajectory_maker.play("00000099", 0, *["0.0"] * 1000)
    assert await run.buffer.submit(unknown, "w") is SubmitOutcome.REFUSED_UNKNOWN
    keys = [key async for key in client.scan_iter(match=run.store.key("*"), count=1000)]
    assert not [key for key in keys if b"staged" in key]
    assert await client.ttl(run.store.key(f"payload:{group}:0")) == -1, "accepted: it must not expire"
    assert await run.buffer.fetch([group]) == [(first,)]


async def test_staged_payload_that_is_gone_before_its_script_is_sent_again(make_run, trajectory_maker):
    """As after a server that lost its last second between the two."""
    run = await make_run()
    group = await claim_one(run)
    big = trajectory_maker.play(group, 0, *["0.0"] * 1000)
    sets, pipeline = [], run.store.client.pipeline

    def losing(*args, **options):
        made = pipeline(*args, **options)
        keep = made.set

        def forget_first(name, value, **settings):
            sets.append(name)
            return keep(name if len(sets) > 1 else f"{name}:elsewhere", value, **settings)

        made.set = forget_first
        return made

    run.store.client.pipeline = losing
    assert await run.buffer.submit(big, "w") is SubmitOutcome.ACCEPTED
    assert len(sets) == 2
    assert await run.buffer.fetch([group]) == [(big,)]


async def test_member_that_does_not_exist_is_an_error(make_run, trajectory_maker):
    run = await make_run(group_size=2)
    group = await claim_one(run)
    with pytest.raises(ExperienceError, match="there is no member 2"):
        await run.buffer.submit(trajectory_maker.play(group, 2, "0.0"), "w")


async def test_staleness_counts_from_the_oldest_token_of_any_member_as_in_cases_d02_and_d12(make_run, trajectory_maker):
    run = await make_run(group_size=2, max_staleness=9)
    for step in range(1, 7):
        await run.step(step, await run.ready(f"0.{step - 1}", groups=2))
    group = (await run.claim("0.2", groups=1)).groups[0].group_id
    header = (await run.buffer.peek()).headers[0]
    assert (header.oldest, header.newest) == (2, 2)
    await run.buffer.submit(trajectory_maker.play(group, 0, "0.3", "0.4", "0.6"), "w")
    header = (await run.buffer.peek()).headers[0]
    assert (header.oldest, header.newest) == (2, 6)  # the other member may still be sampled by version 2
    await run.buffer.submit(trajectory_maker.play(group, 1, "0.5", "0.6"), "w")
    header = (await run.buffer.peek()).headers[0]
    assert (header.oldest, header.newest) == (3, 6)


async def test_failed_member_is_counted_by_kind_and_has_no_payload(make_run, trajectory_maker):
    run = await make_run(group_size=3, min_group_size=2)
    group = await claim_one(run)
    members = [trajectory_maker.play(group, 0, "0.0"), trajectory_maker.break_down(group, 1, FailureKind.TOOL)]
    await run.buffer.submit_many([*members, trajectory_maker.play(group, 2, "0.0")], "w")
    snapshot = await run.buffer.peek()
    assert snapshot.headers[0].state == "ready"
    assert (snapshot.counters.failed, snapshot.counters.buffered) == ({"tool": 1}, 2)
    ((first, second),) = await run.buffer.fetch([group])
    assert (first.member, second.member) == (0, 2)
    assert [(event.kind, event.detail) for event in await run.store.events()] == [("failure", "tool: took too long")]


async def test_group_with_too_few_good_members_fails_as_a_whole_and_frees_its_slot(make_run, trajectory_maker):
    run = await make_run(group_size=3, min_group_size=2, max_staleness=0, prompts_per_step=1)
    group = await claim_one(run)
    broken = [trajectory_maker.break_down(group, member) for member in (0, 1)]
    await run.buffer.submit_many([trajectory_maker.play(group, 2, "0.0"), *broken], "w")
    snapshot = await run.buffer.peek()
    assert (snapshot.headers, snapshot.counters.failed) == ((), {"timeout": 2, "too_few_siblings": 1})
    assert await payload_keys(run) == []
    assert len((await run.claim("0.0")).groups) == 1


async def test_single_member_group_needs_one_good_member_whatever_min_group_size(make_run):
    run = await make_run(group_size=1, min_group_size=2)
    await run.ready("0.0", groups=1)
    assert [header.state for header in (await run.buffer.peek()).headers] == ["ready"]


async def test_expired_owner_is_accepted_while_nobody_else_has_claimed(make_run, trajectory_maker):
    run = await make_run(max_staleness=0)
    group = (await run.claim("0.0")).groups[0].group_id
    await run.pool.reap(ahead_seconds=3600)
    assert await run.buffer.submit(trajectory_maker.play(group, 0, "0.0"), "w") is SubmitOutcome.ACCEPTED
    assert len((await run.claim("0.0", worker="v")).groups) == 1  # the other expired group only


async def test_lost_owner_is_accepted_if_its_trajectory_would_be_admitted_anew(make_run, trajectory_maker):
    run = await make_run(max_staleness=1, group_size=2)
    group = await claim_one(run)
    await run.pool.reap(ahead_seconds=3600)
    await run.claim("0.0", groups=1, worker="v")
    assert await run.buffer.submit(trajectory_maker.play(group, 0, "0.0"), "w") is SubmitOutcome.ACCEPTED
    assert await run.buffer.submit(trajectory_maker.play(group, 0, "0.0", attempt=2), "v") is SubmitOutcome.DUPLICATE
    assert await run.buffer.submit(trajectory_maker.play(group, 1, "0.0", attempt=2), "v") is SubmitOutcome.ACCEPTED
    assert (await run.buffer.peek()).headers[0].state == "ready"


async def test_lost_owner_is_refused_when_its_trajectory_is_over_age_or_the_slots_are_full(make_run, trajectory_maker):
    run = await make_run(max_staleness=1, prompts_per_step=2, group_size=1)
    group = await claim_one(run)
    for step in (1, 2):
        await run.step(step, await run.ready(f"0.{step - 1}", groups=2))
    await run.pool.reap(ahead_seconds=3600)
    assert (await run.claim("0.2", groups=4, worker="v")).groups[0].group_id == group
    assert await run.buffer.submit(trajectory_maker.play(group, 0, "0.0"), "w") is SubmitOutcome.REFUSED_STALE
    assert await run.buffer.submit(trajectory_maker.play(group, 0, "0.1"), "w") is SubmitOutcome.REFUSED_LOST
    assert await run.buffer.submit(trajectory_maker.break_down(group, 0), "w") is SubmitOutcome.REFUSED_LOST
    assert await payload_keys(run) == []
    assert await run.buffer.submit(trajectory_maker.play(group, 0, "0.2"), "v") is SubmitOutcome.ACCEPTED


async def test_late_submit_makes_its_group_as_old_as_its_oldest_token(make_run, trajectory_maker):
    run = await make_run(max_staleness=1, group_size=2, prompts_per_step=2)
    group = await claim_one(run)
    await run.pool.reap(ahead_seconds=3600)
    await run.buffer.publish(0, 1)
    await run.claim("0.1", groups=1, worker="v")
    assert (await run.buffer.peek()).headers[0].oldest == 1
    assert await run.buffer.submit(trajectory_maker.play(group, 0, "0.0"), "w") is SubmitOutcome.ACCEPTED
    assert (await run.buffer.peek()).headers[0].oldest == 0


class LosesFirstAnswers:
    """A client whose connection breaks after every other request has taken effect, before its answer arrives."""

    def __init__(self, client):
        self._client = client
        self._requests = 0

    def __getattr__(self, name):
        return getattr(self._client, name)

    def lose(self):
        self._requests += 1
        if self._requests % 2:
            raise redis.ConnectionError("answer lost")

    async def execute_command(self, *command):
        answer = await self._client.execute_command(*command)
        self.lose()
        return answer

    def pipeline(self, transaction):
        pipeline = self._client.pipeline(transaction=transaction)
        execute = pipeline.execute

        async def execute_and_lose(**options):
            answers = await execute(**options)
            self.lose()
            return answers

        pipeline.execute = execute_and_lose
        return pipeline


async def test_requests_whose_answer_is_lost_take_effect_once(make_run, redis_client, run_id, trajectory_maker):
    run = await make_run(store=ExperienceStore(LosesFirstAnswers(redis_client), run_id), group_size=2, prompts_per_step=1)
    first, second, third = [group.group_id for group in (await run.claim("0.0")).groups]
    played = [trajectory_maker.play(group, member, "0.0") for group in (first, second) for member in (0, 1)]
    assert await run.buffer.submit_many(played, "w") == [SubmitOutcome.ACCEPTED] * 4
    assert await run.buffer.filter([second]) == (second,)
    assert await run.buffer.evict([third], EvictionReason.STALE, reissue=True) == (third,)
    await run.step(1, [first])
    counters = await run.buffer.counters()
    assert (counters.admitted, counters.trained, counters.filtered, counters.evicted) == (6, 2, 2, {"stale": 2})
    assert counters.is_balanced
    assert [group.prompt.prompt_id for group in (await run.claim("0.1")).groups] == ["2", "3", "4"]


async def test_linked_payload_stays(make_run, trajectory_maker):
    run = await make_run()
    group = await claim_one(run)
    await run.buffer.submit(trajectory_maker.play(group, 0, "0.0"), "w")
    (key,) = await payload_keys(run)
    assert await run.store.client.ttl(key) == -1


async def test_scripts_are_loaded_again_when_the_server_has_forgotten_them(make_run, trajectory_maker):
    run = await make_run()
    group = await claim_one(run)
    await run.store.client.script_flush()
    assert await run.buffer.submit(trajectory_maker.play(group, 0, "0.0"), "w") is SubmitOutcome.ACCEPTED
    await run.store.client.script_flush()
    assert len((await run.buffer.peek()).headers) == 1
