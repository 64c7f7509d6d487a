"""Making batches on a real server: bounds held under a fast producer with stragglers, policies, filters, waits by name."""

import asyncio
import random

import pytest

from laminar.config.root import LaminarConfig
from laminar.errors import RunFailedError
from laminar.types import GroupState
from trainer.sampling import BatchSource

pytestmark = pytest.mark.heavy


def config(bound, policy="wait", sampler="fifo", max_wait_seconds=30.0):
    return LaminarConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rollout": {"group_size": 1},
            "trainer": {"prompts_per_step": 2},
            "experience": {"sampler": sampler},
            "staleness": {"max_staleness": bound, "policy": policy, "max_wait_seconds": max_wait_seconds},
        }
    )


def make_source(run, settings, keeps=lambda group: True, heard=None):
    async def notice(text):
        (heard if heard is not None else []).append(text)

    return BatchSource(settings, run.buffer, keeps, notice)


async def produce(run, play, state, seed):
    """An infinitely fast producer on the newest version, one in ten groups ten polls late."""
    rng = random.Random(seed)
    late = []
    while not state["done"]:
        claim = await run.claim(f"0.{state['published']}")
        for group in claim.groups:
            late.append([rng.choice([0] * 9 + [10]), group, f"0.{state['published']}"])
        for entry in [entry for entry in late if entry[0] == 0]:
            late.remove(entry)
            await run.buffer.submit(play(entry[1].group_id, 0, entry[2]), "w")
        for entry in late:
            entry[0] -= 1
        await asyncio.sleep(0)


@pytest.mark.parametrize("policy", ["wait", "drop"])
@pytest.mark.parametrize("sampler", ["fifo", "freshest_first"])
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
async def test_no_trained_group_is_staler_than_the_bound(make_run, trajectory_maker, bound, sampler, policy):
    run = await make_run(max_staleness=bound, group_size=1, prompts_per_step=2)
    source = make_source(run, config(bound, policy, sampler))
    state = {"published": 0, "done": False}
    worst = []
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(produce(run, trajectory_maker.play, state, seed=bound))
        for step in range(1, 9):
            batch = await source.next_batch(0, step, lambda: False)
            worst += [step - 1 - t.oldest.number for group_ in batch.groups for t in group_]
            await run.buffer.publish(0, step)
            await run.buffer.ack(0, step)
            state["published"] = step
        state["done"] = True
    assert max(worst) <= bound
    counters = await run.buffer.counters()
    assert counters.is_balanced
    assert counters.trained == 16
    if policy == "wait":
        assert counters.num_evicted == 0


async def test_useless_groups_are_filtered_before_a_batch_is_taken(make_run, trajectory_maker):
    run = await make_run(max_staleness=2, prompts_per_step=2)
    groups = (await run.claim(groups=4)).groups
    for number, group in enumerate(groups):
        await run.buffer.submit(trajectory_maker.play(group.group_id, 0, "0.0", reward=float(number % 2)), "w")
    source = make_source(run, config(2), keeps=lambda group: group[0].reward == 1.0)
    batch = await source.next_batch(0, 1, lambda: False)
    assert [t.reward for group in batch.groups for t in group] == [1.0, 1.0]
    assert (await run.buffer.counters()).filtered == 2
    assert sorted(batch.seen_rewards) == [0.0, 0.0, 1.0, 1.0]


async def test_nothing_but_useless_groups_ends_the_run_with_the_reason(make_run, trajectory_maker):
    run = await make_run(max_staleness=2, prompts_per_step=2)
    source = make_source(run, config(2), keeps=lambda group: False)
    state = {"published": 0, "done": False}

    async def consume():
        with pytest.raises(RunFailedError, match="too easy, too hard or broken"):
            await source.next_batch(0, 1, lambda: False)
        state["done"] = True

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(produce(run, trajectory_maker.play, state, seed=0))
        group.create_task(consume())


async def test_due_groups_are_evicted_and_reissued_after_the_longest_wait(make_run, trajectory_maker):
    run = await make_run(max_staleness=0, prompts_per_step=2)
    straggler, *others = (await run.claim(groups=2)).groups
    await run.finish(others, "0.0")
    source = make_source(run, config(0, max_wait_seconds=0.05))
    waiting = asyncio.create_task(source.next_batch(0, 1, lambda: False))
    async with asyncio.timeout(10):
        while not (claim := await run.claim(groups=1)).groups:
            await asyncio.sleep(0.01)
        assert claim.groups[0].prompt == straggler.prompt
        await run.finish(claim.groups, "0.0")
        batch = await waiting
    assert set(batch.group_ids) == {others[0].group_id, claim.groups[0].group_id}
    assert (await run.buffer.counters()).evicted == {"waited_too_long": 1}


async def test_the_end_of_the_data_gives_a_short_batch_and_then_none(make_run):
    run = await make_run(3, max_staleness=4, prompts_per_step=2, max_epochs=1)
    source = make_source(run, config(4))
    await run.ready(groups=3)
    sizes = []
    for step in (1, 2):
        batch = await source.next_batch(0, step, lambda: False)
        sizes.append(len(batch.group_ids))
        await run.buffer.publish(0, step)
    assert sizes == [2, 1]
    assert await source.next_batch(0, 3, lambda: False) is None


async def test_a_stop_ends_the_wait(make_run):
    run = await make_run()
    await run.claim(groups=1)
    assert await make_source(run, config(1)).next_batch(0, 1, lambda: True) is None
    assert [h.state for h in (await run.buffer.peek()).headers] == [GroupState.IN_FLIGHT]


async def test_case_d19_a_group_whose_payload_was_deleted_is_named_evicted_and_its_prompt_played_again(make_run):
    run = await make_run(max_staleness=2, prompts_per_step=2)
    ready = await run.ready(groups=3)
    (gone,) = [key async for key in run.store.client.scan_iter(match=run.store.key(f"payload:{ready[1]}*"))]
    await run.store.client.delete(gone)
    heard = []
    batch = await make_source(run, config(2), heard=heard).next_batch(0, 1, lambda: False)
    assert batch.group_ids == (ready[0], ready[2])
    assert [f"trajectory {ready[1]}-000 is gone" in text for text in heard] == [True]
    counters = await run.buffer.counters()
    assert (counters.evicted, counters.is_balanced) == ({"payload_lost": 1}, True)
    assert (await run.claim("0.0", groups=1)).groups[0].prompt.prompt_id == "1"
