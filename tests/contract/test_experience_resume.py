"""Resume: what a new lineage keeps, evicts and issues again. Case D23 with one trajectory a group."""

import json

import pytest

from laminar.errors import ExperienceError
from laminar.experience.answers import Frontier
from laminar.experience.store import ExperienceStore

D23 = {"num_prompts": 12, "prompts_per_step": 2, "max_staleness": 2, "max_epochs": 1, "max_bytes": 10**6}


def saved(frontier: Frontier) -> Frontier:
    """Through the checkpoint's JSON."""
    return Frontier.from_json(json.loads(json.dumps(frontier.to_json())))


async def trained_batches(run, lineage, number):
    """Train to the end of the data: the prompts of each batch, or the ids of groups that were claimed before."""
    batches, prompt_of = [], {}
    while True:
        claim = await run.claim(f"{lineage}.{number}", groups=2)
        prompt_of |= {group.group_id: int(group.prompt.prompt_id) for group in claim.groups}
        await run.finish(claim.groups, f"{lineage}.{number}")
        batch = [header.group_id for header in (await run.buffer.peek()).headers][:2]
        if not batch:
            assert claim.refused == "end_of_data"
            return batches
        number += 1
        await run.step(number, batch, lineage)
        batches.append([prompt_of.get(group_id, group_id) for group_id in batch])


@pytest.fixture
def make_d23_run(make_run):
    """Prompts 0 to 11, 6 claimed ahead, [0, 1] and [2, 3] trained, checkpoint."""

    async def make():
        run = await make_run(**D23)
        groups = await run.ready("0.0", groups=6)
        await run.step(1, groups[0:2])
        await run.step(2, groups[2:4])
        return run, saved(await run.buffer.frontier())

    return make


async def on_an_empty_server(make_run, run, frontier, lineage=1):
    fresh = await make_run(**D23, opened=False, store=ExperienceStore(run.store.client, f"{run.store.prefix}{lineage}"))
    return fresh, await fresh.buffer.restore(lineage, frontier.number, frontier)


async def test_case_d23_frontier_stands_at_what_is_trained(make_d23_run):
    _, frontier = await make_d23_run()
    assert (frontier.number, frontier.epoch, frontier.cursor) == (2, 0, 6)
    assert frontier.pending == ((0, 4, 0), (0, 5, 0))


async def test_case_d23_resume_on_an_empty_server_trains_every_other_prompt_once(make_d23_run, make_run):
    run, frontier = await make_d23_run()
    fresh, report = await on_an_empty_server(make_run, run, frontier)
    assert (report.kept, report.orphaned, report.reissued) == (0, 0, 2)
    assert await trained_batches(fresh, 1, 2) == [[4, 5], [6, 7], [8, 9], [10, 11]]
    counters = await fresh.buffer.counters()
    assert (counters.admitted, counters.trained, counters.evicted) == (14, 12, {"orphaned": 2})


async def test_case_d23_two_resumes_from_one_checkpoint_give_the_same_batches(make_d23_run, make_run):
    run, frontier = await make_d23_run()
    batches = []
    for lineage in (1, 2):
        fresh, _ = await on_an_empty_server(make_run, run, frontier, lineage)
        batches.append(await trained_batches(fresh, lineage, 2))
    assert batches[0] == batches[1]


async def test_case_d23_live_server_keeps_what_was_buffered_and_issues_the_rest_once(make_d23_run):
    run, frontier = await make_d23_run()
    buffered = [header.group_id for header in (await run.buffer.peek()).headers]
    report = await run.buffer.restore(1, 2, frontier)
    assert (report.kept, report.orphaned, report.reissued) == (2, 0, 0)
    assert await trained_batches(run, 1, 2) == [buffered, [6, 7], [8, 9], [10, 11]]


async def test_case_d23_three_prompts_in_flight_at_the_kill_are_generated_again_once(make_d23_run):
    run, frontier = await make_d23_run()
    buffered = [header.group_id for header in (await run.buffer.peek()).headers]
    await run.claim("0.2", groups=3)
    report = await run.buffer.restore(1, 2, frontier)
    assert (report.kept, report.orphaned, report.reissued) == (2, 3, 3)
    assert await trained_batches(run, 1, 2) == [buffered, [6, 7], [8, 9], [10, 11]]


async def test_case_d23_steps_after_the_checkpoint_are_trained_again_and_counted_once(make_d23_run):
    run, frontier = await make_d23_run()
    buffered = [header.group_id for header in (await run.buffer.peek()).headers]
    await run.step(3, buffered)
    await run.buffer.take(0, 4, await run.ready("0.3", groups=2))
    report = await run.buffer.restore(1, 2, frontier)
    assert (report.kept, report.orphaned, report.reissued) == (0, 2, 4)
    counters = await run.buffer.counters()
    assert (counters.admitted, counters.trained, counters.evicted) == (8, 4, {"orphaned": 4})
    assert await trained_batches(run, 1, 2) == [[4, 5], [6, 7], [8, 9], [10, 11]]


async def test_case_d23_checkpoint_near_the_end_resumes_with_the_last_batch_and_reports_the_end(make_d23_run, make_run):
    run, _ = await make_d23_run()
    ready = [header.group_id for header in (await run.buffer.peek()).headers]
    for step in (3, 4, 5):
        ready += await run.ready(f"0.{step - 1}", groups=2)
        await run.step(step, ready[:2])
        ready = ready[2:]
    assert (await run.buffer.peek()).end_of_data
    fresh, _ = await on_an_empty_server(make_run, run, saved(await run.buffer.frontier()))
    assert not (await fresh.buffer.peek()).end_of_data
    assert await trained_batches(fresh, 1, 5) == [[10, 11]]


async def test_ready_groups_with_tokens_newer_than_the_checkpoint_are_orphaned(make_d23_run):
    run, frontier = await make_d23_run()
    await run.step(3, [header.group_id for header in (await run.buffer.peek()).headers])
    older = await run.ready("0.2", groups=1)
    await run.ready("0.3", groups=1)
    report = await run.buffer.restore(1, 2, frontier)
    assert (report.kept, report.orphaned, report.reissued) == (1, 1, 3)
    assert [header.group_id for header in (await run.buffer.peek()).headers] == older


async def test_restore_may_be_repeated_and_lineages_only_grow(make_d23_run):
    run, frontier = await make_d23_run()
    report = await run.buffer.restore(1, 2, frontier)
    counters = await run.buffer.counters()
    assert await run.buffer.restore(1, 2, frontier) == report
    assert await run.buffer.counters() == counters
    with pytest.raises(ExperienceError, match="lineage 0 cannot be opened: the run is in lineage 1"):
        await run.buffer.restore(0, 2, frontier)


async def test_restore_needs_the_frontier_of_its_number(make_d23_run):
    run, frontier = await make_d23_run()
    with pytest.raises(ExperienceError, match="number 3 cannot be restored with the data cursor of number 2"):
        await run.buffer.restore(1, 3, frontier)
    with pytest.raises(ExperienceError, match="number 2 cannot be restored with the data cursor of number 0"):
        await run.buffer.restore(1, 2)


async def test_trainer_that_dies_before_its_first_checkpoint_starts_over_with_every_prompt(make_d23_run):
    run, _ = await make_d23_run()
    report = await run.buffer.restore(1, 0)
    assert (report.kept, report.orphaned, report.reissued) == (2, 0, 4)
    assert (await run.buffer.counters()).trained == 0


async def test_server_that_forgot_the_newest_steps_does_not_train_their_groups_again(make_run):
    run = await make_run(**D23)
    first = await run.ready("0.0", groups=4)
    older = saved(await run.buffer.frontier())
    trained_elsewhere = Frontier(number=1, cursor=4, next_admission=4, pending=older.pending[2:], counters=older.counters)
    report = await run.buffer.restore(1, 1, trained_elsewhere)
    assert (report.kept, report.orphaned, report.reissued) == (2, 2, 0)
    assert [header.group_id for header in (await run.buffer.peek()).headers] == first[2:]


async def test_resume_across_an_epoch_issues_each_occurrence_once(make_run):
    run = await make_run(num_prompts=3, prompts_per_step=2, shuffle=True, max_epochs=2)
    frontier = await run.buffer.frontier()
    await run.claim("0.0", groups=3)
    await run.claim("0.0", groups=2)
    await run.buffer.restore(1, 0, frontier)
    groups = [*(await run.claim("1.0", groups=9)).groups]
    played = [group.prompt.prompt_id for group in groups]
    assert sorted(played[:3]) == ["0", "1", "2"]
    assert sorted(played[3:]) == ["0", "1", "2"]


async def test_payloads_and_bytes_of_a_dead_lineage_are_freed(make_d23_run):
    run, frontier = await make_d23_run()
    ready = [header.group_id for header in (await run.buffer.peek()).headers]
    await run.buffer.take(0, 3, ready)
    await run.buffer.publish(0, 3)
    await run.buffer.take(0, 4, await run.ready("0.3", groups=2))
    await run.buffer.restore(1, 2, frontier)
    assert (await run.buffer.peek()).reserved_bytes == 0
    left = [key async for key in run.store.client.scan_iter(match=run.store.key("*"), count=1000)]
    assert not [key for key in left if b"payload" in key or b"members" in key]
