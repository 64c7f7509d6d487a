"""Making batches on a real server: bounds held under a fast producer with stragglers, policies, filters, waits by name."""

import asyncio
import dataclasses
import random
import sys
from types import SimpleNamespace

import pytest

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError, RunFailedError
from laminar.policies.masking import num_over_age_tokens, oldest_trained_number, trained_mask
from laminar.telemetry.registry import check_declared
from laminar.types import EvictionReason, FinishReason, GroupState
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.sampling import BatchSource

pytestmark = pytest.mark.heavy


def config(bound, policy="wait", sampler="fifo", max_wait_seconds=30.0, group_size=1, prompts_per_step=2):
    return LaminarConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rollout": {"group_size": group_size},
            "trainer": {"prompts_per_step": prompts_per_step},
            "experience": {"sampler": sampler},
            "staleness": {"max_staleness": bound, "policy": policy, "max_wait_seconds": max_wait_seconds},
        }
    )


def make_source(run, settings, keeps=lambda group: True, heard=None):
    async def notice(text):
        (heard if heard is not None else []).append(text)

    return BatchSource(settings, run.buffer, keeps, notice)


async def produce(run, play, state, seed):
    """An infinitely fast producer on the newest version; one member in ten takes ten polls, all others none.

    A late one goes on under the weights of the day, as after a swap in flight.
    """
    rng = random.Random(seed)
    late = []
    while not state["done"]:
        begun = f"0.{state['published']}"
        claim = await run.claim(begun)
        late += [[rng.choice([0] * 9 + [10]), group, member, begun] for group in claim.groups for member in group.members]
        for entry in [entry for entry in late if entry[0] == 0]:
            late.remove(entry)
            _, group, member, begun = entry
            await run.buffer.submit(play(group.group_id, member, *sorted({begun, f"0.{state['published']}"})), "w")
        for entry in late:
            entry[0] -= 1
        await asyncio.sleep(0)


def trained_staleness(batch, step, bound):
    """Staleness of every token of a batch that enters the loss."""
    oldest = oldest_trained_number(step - 1, bound)
    chains = [chain for group in batch.groups for member in group for chain in member.chains]
    numbers = [chain.version_numbers()[trained_mask(chain, oldest)] for chain in chains]
    assert all(
        sum(map(len, (c.version_numbers()[trained_mask(c, oldest)] for t in g for c in t.chains))) for g in batch.groups
    )
    return [step - 1 - int(number) for found in numbers for number in found]


@pytest.mark.parametrize("policy", ["wait", "drop", "mask"])
@pytest.mark.parametrize(
    ("sampler", "group_size"),
    [
        ("fifo", 1),
        ("freshest_first", 3),
        pytest.param("fifo", 3, marks=pytest.mark.slow),
        pytest.param("freshest_first", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
async def test_no_trained_token_is_staler_than_the_bound(make_run, trajectory_maker, bound, sampler, policy, group_size):
    run = await make_run(max_staleness=bound, group_size=group_size, prompts_per_step=2, exempt=policy == "mask")
    source = make_source(run, config(bound, policy, sampler, group_size=group_size))
    state = {"published": 0, "done": False}
    trajectories, tokens = [], []
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(produce(run, trajectory_maker.play, state, seed=bound))
        for step in range(1, 9):
            batch = await source.next_batch(0, step, lambda: False)
            trajectories += [step - 1 - t.oldest.number for group_ in batch.groups for t in group_]
            tokens += trained_staleness(batch, step, bound)
            await run.buffer.publish(0, step)
            await run.buffer.ack(0, step)
            state["published"] = step
        state["done"] = True
    counters = await run.buffer.counters()
    assert counters.is_balanced
    assert counters.trained == 16 * group_size
    assert max(tokens) <= bound
    if policy != "mask":
        assert max(trajectories) <= bound
    if policy == "wait":  # nothing that could be trained is discarded: all is trained, or still on its way
        assert counters.admitted == counters.trained + counters.running + counters.buffered
    assert set(counters.evicted) <= {"wait": set(), "drop": {"stale"}, "mask": {"fully_masked"}}[policy]
    assert counters.reissued == counters.num_evicted == sum(counters.dropped_lengths.values())


@pytest.fixture
async def masked(make_run, trajectory_maker):
    """K = 1, B = 2, policy `mask`: two stragglers begun on version 0 are still in flight at version 2."""
    run = await make_run(max_staleness=1, prompts_per_step=2, exempt=True)
    source = make_source(run, config(1, "mask"))
    early, late, *others = (await run.claim(groups=4)).groups
    await run.finish(others, "0.0")
    for step in (1, 2):
        batch = await source.next_batch(0, step, lambda: False)
        assert not {early.group_id, late.group_id} & set(batch.group_ids)
        await run.buffer.publish(0, step)
        await run.ready(f"0.{step}")
    return run, source, early, late


async def test_groups_under_mask_are_never_due_and_lose_only_their_over_age_tokens(masked, trajectory_maker):
    run, source, early, late = masked
    for group in (early, late):  # at step 3, tokens of version 1 and above are young enough
        await run.buffer.submit(trajectory_maker.play(group.group_id, 0, "0.0", "0.1"), "w")
    batch = await source.next_batch(0, 3, lambda: False)
    assert batch.group_ids == (early.group_id, late.group_id)
    assert [num_over_age_tokens(group[0], oldest_trained_number(2, 1)) for group in batch.groups] == [3, 3]
    assert (await run.buffer.counters()).num_evicted == 0


async def test_groups_without_a_token_left_are_evicted_before_they_are_taken(masked, trajectory_maker):
    run, source, early, _ = masked
    await run.buffer.submit(trajectory_maker.play(early.group_id, 0, "0.0"), "w")
    batch = await source.next_batch(0, 3, lambda: False)
    assert early.group_id not in batch.group_ids
    counters = await run.buffer.counters()
    assert (counters.evicted, counters.reissued, counters.dropped_lengths) == ({"fully_masked": 1}, 1, {"64": 1})
    assert batch.metrics()["staleness/dropped_length_64"] == 1
    assert (batch.metrics()["experience/evictions_fully_masked"], source.dropped_groups) == (1, 1)
    check_declared(batch.metrics())
    assert (await run.claim("0.2", groups=1)).groups[0].prompt == early.prompt


async def test_what_is_kept_ready_for_too_long_is_judged_anew_at_every_step(make_run, trajectory_maker):
    """`freshest_first` starves a ready group of version 0: fine at steps 1 and 2, fully masked at step 3."""
    run = await make_run(max_staleness=1, prompts_per_step=1, exempt=True)
    source = make_source(run, config(1, "mask", "freshest_first", prompts_per_step=1))
    first, old = (await run.claim(groups=2)).groups
    await run.finish([first, old], "0.0")
    for step in (1, 2, 3):
        batch = await source.next_batch(0, step, lambda: False)
        assert old.group_id not in batch.group_ids
        await run.buffer.publish(0, step)
        await run.ready(f"0.{step}", groups=1)
    assert (await run.buffer.counters()).evicted == {"fully_masked": 1}


async def test_drop_counts_what_it_drops_by_length_and_issues_it_again(make_run, trajectory_maker):
    run = await make_run(max_staleness=0, group_size=2, prompts_per_step=1)
    straggler = (await run.claim(groups=1)).groups[0]
    await run.buffer.submit(trajectory_maker.play(straggler.group_id, 0, *["0.0"] * 22), "w")  # 66 tokens
    await run.buffer.evict([straggler.group_id], EvictionReason.STALE, reissue=True)
    counters = await run.buffer.counters()
    assert counters.dropped_lengths == {"128": 1, "unfinished": 1}
    (again,) = (await run.claim(groups=1)).groups
    assert again.prompt == straggler.prompt


async def test_a_prompt_that_is_evicted_again_and_again_is_abandoned_visibly(make_run):
    run = await make_run(1, max_epochs=1)
    for _ in range(9):
        (group,) = (await run.claim(groups=1)).groups
        await run.buffer.evict([group.group_id], EvictionReason.STALE, reissue=True)
    assert (await run.claim(groups=1)).refused == "end_of_data"
    counters = await run.buffer.counters()
    assert (counters.reissued, counters.abandoned) == (8, 1)
    assert [event.kind for event in await run.store.events()][-1] == "abandoned"


@pytest.fixture
def user_module(monkeypatch, tmp_path):
    """A sampler module beside the user's config."""
    (tmp_path / "my_samplers.py").write_text(
        "def newest_admission(ready, trained_on):\n"
        "    return sorted(ready, key=lambda header: -header.admission)\n\n\n"
        "def forgetful(ready, trained_on):\n"
        "    return ready[:1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_samplers", raising=False)  # another test's


async def test_a_users_sampler_orders_within_the_bound(make_run, user_module):
    run = await make_run(max_staleness=1, prompts_per_step=2)
    source = make_source(run, config(1, sampler="my_samplers:newest_admission"))
    ids = await run.ready(groups=4)
    assert (await source.next_batch(0, 1, lambda: False)).group_ids == (ids[3], ids[2])


async def test_a_users_sampler_that_loses_groups_is_refused(make_run, user_module):
    run = await make_run(max_staleness=1, prompts_per_step=2)
    source = make_source(run, config(1, sampler="my_samplers:forgetful"))
    await run.ready(groups=4)
    with pytest.raises(ConfigError, match="must return each exactly once"):
        await source.next_batch(0, 1, lambda: False)


def test_a_sampler_that_is_not_there_is_refused_by_its_setting(user_module):
    with pytest.raises(ConfigError, match=r"`experience.sampler` is 'my_samplers:nothing'"):
        make_source(SimpleNamespace(buffer=None), config(1, sampler="my_samplers:nothing"))


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


async def test_answers_that_are_all_cut_are_named_as_the_reason_with_the_setting(make_run, trajectory_maker):
    run = await make_run(max_staleness=2, prompts_per_step=2)
    source = make_source(run, config(2), keeps=PolicyGradient(GrpoOptions(mask_truncated=True)).keeps)
    state = {"published": 0, "done": False}

    def play_cut(*args, **settings):
        return dataclasses.replace(trajectory_maker.play(*args, **settings), finish_reason=FinishReason.LENGTH)

    async def consume():
        with pytest.raises(
            RunFailedError, match=r"gave no batch: in \d+ every answer was cut .* raise rollout.max_new_tokens"
        ):
            await source.next_batch(0, 1, lambda: False)
        state["done"] = True

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(produce(run, play_cut, state, seed=0))
        group.create_task(consume())


async def test_due_groups_are_evicted_and_reissued_after_the_longest_wait(make_run, trajectory_maker):
    run = await make_run(max_staleness=0, prompts_per_step=2)
    straggler, *others = (await run.claim(groups=2)).groups
    await run.finish(others, "0.0")
    source = make_source(run, config(0, max_wait_seconds=0.5))
    waiting = asyncio.create_task(source.next_batch(0, 1, lambda: False))
    async with asyncio.timeout(10):
        while not (claim := await run.claim(groups=1)).groups:
            await asyncio.sleep(0.01)
        assert claim.groups[0].prompt == straggler.prompt
        await run.finish(claim.groups, "0.0")
        batch = await waiting
    assert set(batch.group_ids) == {others[0].group_id, claim.groups[0].group_id}
    assert (await run.buffer.counters()).evicted == {"waited_too_long": 1}


async def test_with_over_provisioning_what_a_batch_overtakes_is_let_go_and_issued_again_within_its_share(make_run):
    """Six groups, batches of 2; the first three are slow. At 1.5 one group is recycled with each batch, the oldest."""
    run = await make_run(max_staleness=2, prompts_per_step=2)
    *slow, fast, faster, _young = (await run.claim(groups=6)).groups
    await run.finish([fast, faster], "0.0")
    settings = config(2)
    rollout = settings.rollout.model_copy(update={"over_provision": 1.5})
    source = make_source(run, settings.model_copy(update={"rollout": rollout}))
    batch = await source.next_batch(0, 1, lambda: False)
    assert set(batch.group_ids) == {fast.group_id, faster.group_id}
    counters = await run.buffer.counters()
    assert (counters.evicted, counters.dropped_lengths, source.dropped_groups) == ({"recycled": 1}, {}, 0)
    (again,) = (await run.claim(groups=6)).groups
    assert again.prompt == slow[0].prompt
    left = [h.group_id for h in (await run.buffer.peek()).headers if h.state is GroupState.IN_FLIGHT]
    assert slow[0].group_id not in left
    assert {slow[1].group_id, slow[2].group_id} <= set(left)


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
    assert await run.store.client.delete(run.store.key(f"payloads:{ready[1]}")) == 1
    heard = []
    batch = await make_source(run, config(2), heard=heard).next_batch(0, 1, lambda: False)
    assert batch.group_ids == (ready[0], ready[2])
    assert [f"trajectory {ready[1]}-000 is gone" in text for text in heard] == [True]
    counters = await run.buffer.counters()
    assert (counters.evicted, counters.dropped_lengths, counters.is_balanced) == ({"payload_lost": 1}, {}, True)
    assert (await run.claim("0.0", groups=1)).groups[0].prompt.prompt_id == "1"


async def test_a_bound_that_was_loosened_while_the_run_lives_masks_and_evicts_nothing(make_run):
    run = await make_run(prompts_per_step=2, group_size=1, max_staleness=1)
    source = make_source(run, config(1))
    await run.store.client.hset(run.store.key("run"), "bound", 3)
    await run.ready("0.0")  # (3 + 1) * 2 groups, all of version 0
    for step in range(1, 5):
        batch = await source.next_batch(0, step, lambda: False)
        assert (len(batch.group_ids), batch.oldest_trained) == (2, 0)  # trained on 3 at the last: 3 - 3
        await run.buffer.publish(0, step)
    assert source.dropped_groups == 0
