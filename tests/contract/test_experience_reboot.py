"""A server that was restarted, lost its newest writes, or was replaced by an empty one: the trainer opens it again."""

import pytest

from laminar.errors import ExperienceError
from laminar.experience.answers import Frontier
from laminar.experience.store import ExperienceStore

SETTINGS = {"num_prompts": 12, "prompts_per_step": 2, "max_staleness": 2, "max_epochs": 1, "max_bytes": 10**6}


async def take_frontier(run, step, lineage=0):
    """What the trainer holds once a step is taken and trained: the cursor before it, without what the step trains."""
    snapshot = await run.buffer.peek()
    batch = [header.group_id for header in snapshot.headers if header.state == "ready"][:2]
    await run.buffer.take(lineage, step, batch)
    frontier = await run.buffer.frontier()
    return frontier.advance([snapshot.occurrences[group_id] for group_id in batch], len(batch))


async def remaining_prompts(run, lineage, number):
    """Train to the end of the data; every prompt that was claimed on the way."""
    prompts = []
    while True:
        claim = await run.claim(f"{lineage}.{number}", groups=2)
        prompts += [int(group.prompt.prompt_id) for group in claim.groups]
        await run.finish(claim.groups, f"{lineage}.{number}")
        batch = [header.group_id for header in (await run.buffer.peek()).headers][:2]
        if not batch:
            return prompts
        number += 1
        await run.step(number, batch, lineage)


async def test_a_restarted_server_takes_and_publishes_nothing_until_it_is_restored(server, client, make_run, reboot):
    run = await make_run(**SETTINGS, store=ExperienceStore(client, "r"))
    ready = await run.ready("0.0", groups=4)
    frontier = await take_frontier(run, 1)
    reboot(server)
    assert not (await run.buffer.peek()).is_open
    for request in (run.buffer.publish(0, 1), run.buffer.take(0, 1, ready[2:]), run.buffer.frontier()):
        with pytest.raises(ExperienceError, match="restored"):
            await request
    report = await run.buffer.restore(1, 1, frontier)
    assert (report.kept, report.reissued) == (2, 0)
    assert (await run.buffer.peek()).published.number == 1
    counters = await run.buffer.counters()
    assert (counters.trained, counters.buffered, counters.is_balanced) == (2, 2, True)


async def test_a_lost_tail_with_take_publish_and_ack_is_made_good_by_the_trainers_word(
    server, client, make_run, reboot, append_only_file
):
    run = await make_run(**SETTINGS, store=ExperienceStore(client, "r"))
    await run.ready("0.0", groups=4)
    kept_bytes = append_only_file().stat().st_size
    frontier = await take_frontier(run, 1)
    await run.buffer.publish(0, 1, trained=True)
    await run.buffer.ack(0, 1)
    reboot(server, kept_bytes=kept_bytes)
    report = await run.buffer.restore(1, 1, frontier)
    assert (report.kept, report.orphaned, report.reissued) == (2, 2, 0)  # the trained two go, and are not issued again
    counters = await run.buffer.counters()
    assert (counters.trained, counters.is_balanced) == (2, True)
    assert sorted(await remaining_prompts(run, 1, 1)) == list(range(4, 12))


async def test_a_lost_tail_with_claims_never_gives_a_group_id_out_twice(
    server, client, make_run, trajectory_maker, reboot, append_only_file
):
    run = await make_run(**SETTINGS, store=ExperienceStore(client, "r"))
    frontier = await run.buffer.frontier()
    kept_bytes = append_only_file().stat().st_size
    forgotten = (await run.claim("0.0", groups=3)).groups
    reboot(server, kept_bytes=kept_bytes)
    await run.buffer.restore(1, 0, frontier)
    again = (await run.claim("1.0", groups=3)).groups
    assert [group.prompt for group in again] == [group.prompt for group in forgotten]
    assert not {group.group_id for group in again} & {group.group_id for group in forgotten}
    late = trajectory_maker.play(forgotten[0].group_id, 0, "0.0")
    assert await run.buffer.submit(late, "w") == "refused_unknown"


async def test_an_empty_replacement_goes_on_at_the_trainers_number(make_run):
    run = await make_run(**SETTINGS)
    await run.ready("0.0", groups=6)
    frontier = await take_frontier(run, 1)
    await run.store.client.delete(*[key async for key in run.store.client.scan_iter(match=run.store.key("*"), count=1000)])
    assert not (await run.buffer.peek()).is_open
    with pytest.raises(ExperienceError, match="not configured yet"):
        await run.buffer.restore(1, 1, frontier)
    assert (await run.claim("0.1", groups=1)).refused == "not_ready"
    empty = await make_run(**SETTINGS, opened=False, store=run.store)
    report = await empty.buffer.restore(1, 1, frontier)
    assert (report.kept, report.reissued) == (0, 4)
    assert sorted(await remaining_prompts(empty, 1, 1)) == list(range(2, 12))
    counters = await empty.buffer.counters()
    assert (counters.trained, counters.is_balanced) == (12, True)


async def test_servers_that_are_replaced_before_a_step_is_trained_never_give_a_group_id_out_twice(make_run):
    run = await make_run(**SETTINGS)
    await run.ready("0.0", groups=2)
    frontier = await take_frontier(run, 1)
    given = []
    for lineage in (1, 2, 3):
        await run.store.client.flushdb()
        run = await make_run(**SETTINGS, opened=False, store=run.store)
        await run.buffer.restore(lineage, 1, frontier)
        given += [group.group_id for group in (await run.claim(f"{lineage}.1", groups=3)).groups]
    assert len(set(given)) == len(given) == 9


async def test_a_batch_that_was_taken_and_not_trained_is_ready_again(make_run):
    run = await make_run(**SETTINGS)
    await run.ready("0.0", groups=4)
    await take_frontier(run, 1)
    report = await run.buffer.restore(1, 0)
    assert (report.kept, report.reissued) == (4, 0)
    headers = (await run.buffer.peek()).headers
    assert [header.state for header in headers] == ["ready"] * 4
    assert [len(group) for group in await run.buffer.fetch([header.group_id for header in headers])] == [1] * 4
    assert (await run.buffer.counters()).is_balanced


async def test_case_d23_what_the_trainer_trained_after_the_checkpoint_is_not_generated_again(make_run):
    """As D23, but the spool holds steps 2 and 3 after the checkpoint at 1: the run is restored at 3."""
    run = await make_run(**SETTINGS)
    await run.ready("0.0", groups=6)
    for step in (1, 2):
        frontier = await take_frontier(run, step)
        await run.buffer.publish(0, step)
        await run.buffer.ack(0, step)
    frontier = await take_frontier(run, 3)  # killed before its publish
    await run.claim("0.2", groups=3)
    report = await run.buffer.restore(1, 3, Frontier.from_json(frontier.to_json()))
    assert (report.kept, report.reissued) == (0, 3)
    assert sorted(await remaining_prompts(run, 1, 3)) == list(range(6, 12))
    assert (await run.buffer.counters()).trained == 12


async def test_a_step_whose_groups_the_server_forgot_is_not_published_as_if_nothing_were(make_run):
    run = await make_run(**SETTINGS)
    await run.ready("0.0", groups=2)
    with pytest.raises(ExperienceError, match="step 1 was trained, but its groups are forgotten"):
        await run.buffer.publish(0, 1, trained=True)


async def test_an_ack_frees_earlier_steps_whose_ack_was_lost(make_run):
    run = await make_run(**SETTINGS)
    ready = await run.ready("0.0", groups=4)
    for step, batch in ((1, ready[:2]), (2, ready[2:])):
        await run.buffer.take(0, step, batch)
        await run.buffer.publish(0, step)
    await run.buffer.ack(0, 2)
    assert (await run.buffer.peek()).reserved_bytes == 0


async def test_a_server_that_is_replaced_between_a_grant_and_its_prompts_grants_nothing(make_run, monkeypatch):
    run = await make_run()
    granted = run.store.run

    async def grant_then_lose_all(script, *arguments, **named):
        answer = await granted(script, *arguments, **named)
        await run.store.client.flushdb()
        return answer

    monkeypatch.setattr(run.store, "run", grant_then_lose_all)
    claim = await run.claim("0.0", groups=2)
    assert (claim.groups, claim.refused) == ((), "not_ready")


@pytest.mark.parametrize(("key", "num_kept"), [("headers", 0), ("outstanding", 2)])
async def test_groups_whose_key_is_deleted_close_the_run_until_it_is_restored_without_them(make_run, key, num_kept):
    """Two groups trained, two ready, one whose lease has ended, one given back; then somebody deletes a key of the run."""
    run = await make_run(**SETTINGS)
    await run.ready("0.0", groups=4)
    frontier = await take_frontier(run, 1)
    await run.buffer.publish(0, 1, trained=True)
    await run.buffer.ack(0, 1)
    await run.claim("0.1", groups=2, lease_seconds=0.0)
    await run.pool.give_back("w", ["00000005"])
    await run.store.client.delete(run.store.key(key))
    assert not (await run.buffer.peek()).is_open
    assert (await run.claim("0.1")).refused == "not_ready"
    for request in (run.buffer.take(0, 2, ["00000002"]), run.buffer.publish(0, 2), run.buffer.frontier()):
        with pytest.raises(ExperienceError, match="restored"):
            await request
    report = await run.buffer.restore(1, 1, frontier)
    assert (report.kept, report.reissued, report.lost) == (num_kept, 4 - num_kept, 0)
    snapshot = await run.buffer.peek()
    assert (len(snapshot.headers), snapshot.counters.buffered, snapshot.counters.running) == (num_kept, num_kept, 0)
    assert snapshot.counters.is_balanced
    assert snapshot.reserved_bytes == sum(header.num_bytes for header in snapshot.headers)
    left = [key async for key in run.store.client.scan_iter(match=run.store.key("members:*"))]
    assert len(left) == num_kept
    assert sorted(await remaining_prompts(run, 1, 1)) == list(range(2 + num_kept, 12))
    assert (await run.buffer.counters()).trained == 12
