"""Case D18 on a real server: uninformative groups are refilled in bounded rounds; then a clear stop or a stated wait."""

import asyncio

import pytest

from laminar.config.root import LaminarConfig
from laminar.errors import RunFailedError
from laminar.telemetry.registry import check_declared
from trainer.algorithms.policy_gradient import PolicyGradient
from trainer.algorithms.presets import GrpoOptions
from trainer.sampling import BatchSource

pytestmark = pytest.mark.heavy

PER_ROUND = 4
BOUND_ROUNDS = 5


class Table:
    """A trainer that wants 3 informative groups of 2, and a producer that makes 4 groups a round."""

    def __init__(self, run, maker, on_uninformative="stop"):
        self.run, self.maker, self.heard, self.useless, self.stop = run, maker, [], 0, False
        config = LaminarConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"path": "d"},
                "rollout": {"group_size": 2},
                "trainer": {
                    "prompts_per_step": 3,
                    "max_filter_rounds": BOUND_ROUNDS,
                    "on_uninformative": on_uninformative,
                },
                "staleness": {"max_staleness": 2},
            }
        )
        self.source = BatchSource(config, run.buffer, PolicyGradient(GrpoOptions()).keeps, self.notice)

    async def notice(self, text):
        self.heard.append(text)

    def ask(self, step):
        """The trainer begins to wait for the batch of this step."""
        self.waiting = asyncio.create_task(self._next_batch(step))
        return self.waiting

    async def _next_batch(self, step):
        async with asyncio.timeout(20):
            return await self.source.next_batch(0, step, lambda: self.stop)

    async def round(self, informative, version="0.0", useless=(1.0, 1.0)):
        """Four groups, the last ones informative; returns when the others are filtered, or the trainer waits no more.

        A reward of None is a member that failed. Gives the ids of the informative ones.
        """
        claim = await self.run.claim(version, groups=PER_ROUND)
        assert len(claim.groups) == PER_ROUND
        for number, group in enumerate(claim.groups):
            rewards = (0.0, 1.0) if number >= PER_ROUND - informative else useless
            trajectories = [
                self.maker.break_down(group.group_id, m)
                if r is None
                else self.maker.play(group.group_id, m, version, reward=r)
                for m, r in enumerate(rewards)
            ]
            await self.run.buffer.submit_many(trajectories, "w")
        self.useless += sum(reward is not None for reward in useless) * (PER_ROUND - informative)
        async with asyncio.timeout(10):
            while (await self.run.buffer.counters()).filtered < self.useless and not self.waiting.done():
                await asyncio.sleep(0.002)
        return [group.group_id for group in claim.groups[PER_ROUND - informative :]]


@pytest.fixture
async def make_table(make_run, trajectory_maker):
    async def make(on_uninformative="stop"):
        run = await make_run(prompts_per_step=3, group_size=2, max_staleness=2)
        return Table(run, trajectory_maker, on_uninformative)

    return make


async def test_a_one_none_and_two_informative_groups_train_after_the_third_round(make_table):
    table = await make_table()
    waiting = table.ask(1)
    expected = []
    for informative in (1, 0, 2):
        assert not waiting.done()
        expected += await table.round(informative)
    batch = await waiting
    assert batch.group_ids == tuple(expected)
    assert (batch.num_judged, batch.num_kept) == (12, 3)
    assert batch.metrics()["experience/judged_groups"] == 12
    assert batch.metrics()["experience/kept_ratio"] == 0.25
    check_declared(batch.metrics())
    assert (await table.run.buffer.counters()).is_balanced


async def test_groups_that_pass_are_counted_among_all_that_were_judged_and_waiting_has_an_age(make_table):
    table = await make_table()
    waiting = table.ask(1)
    claim = await table.run.claim("0.0", groups=5)
    for group, rewards in zip(claim.groups, [(0.0, 0.0), (0.0, 0.5), (1.0, 0.0), (0.0, 2.0), (1.0, 1.0)], strict=True):
        trajectories = [table.maker.play(group.group_id, m, "0.0", reward=r) for m, r in enumerate(rewards)]
        await table.run.buffer.submit_many(trajectories, "w")
    batch = await waiting
    metrics = batch.metrics()
    judged = metrics["experience/judged_groups"]
    assert judged in (4, 5)  # the fifth may come after the batch is full
    assert metrics["reward/pass_at_k"] == (judged - 2) / judged  # neither of the first two reaches 1
    assert metrics["experience/oldest_age_seconds"] > 0
    check_declared(metrics)


async def test_b_what_is_kept_beyond_the_batch_is_trained_next_with_its_own_version(make_table):
    table = await make_table()
    waiting = table.ask(1)
    kept = await table.round(1) + await table.round(3)
    batch = await waiting
    assert batch.group_ids == tuple(kept[:3])
    await table.run.buffer.publish(0, 1)
    waiting = table.ask(2)
    kept += await table.round(2, "0.1")
    batch = await waiting
    assert batch.group_ids == tuple(kept[3:])
    assert [group[0].oldest.number for group in batch.groups] == [0, 1, 1]


async def test_c_rounds_without_an_informative_group_end_with_the_reason(make_table):
    table = await make_table()
    waiting = table.ask(1)
    for _ in range(4):
        await table.round(0)
        assert (await table.run.buffer.counters()).taken == 0
    with pytest.raises(
        RunFailedError, match=r"5 rounds of 3 groups gave no batch: 1[56] were uninformative: the task is too"
    ):
        await waiting
    counters = await table.run.buffer.counters()
    assert (counters.taken, counters.trained) == (0, 0)
    assert counters.is_balanced


async def test_c_the_stated_wait_warns_each_round_and_then_trains(make_table):
    table = await make_table("wait")
    waiting = table.ask(1)
    for _ in range(9):
        await table.round(0)
    async with asyncio.timeout(10):  # the notice comes a moment after the filter that `round` waits for
        while not any(" 12 rounds" in f" {text}" for text in table.heard):
            await asyncio.sleep(0.002)
    rounds = [int(text.partition(" rounds")[0].split()[-1]) for text in table.heard]
    assert rounds[0] >= 5
    assert rounds[-1] == 12
    assert rounds == sorted(set(rounds))
    assert len(rounds) >= 2
    assert (await table.run.buffer.counters()).taken == 0
    await table.round(3)
    assert len((await waiting).group_ids) == 3


async def test_a_group_that_failed_in_part_and_is_uninformative_counts_once(make_table):
    """13 groups in four rounds, fewer than the 15 that end the run; with their failed members counted again, 18 in three."""
    table = await make_table()
    waiting = table.ask(1)
    for _ in range(3):
        await table.round(0, useless=(None, 1.0))
        assert not waiting.done()
    expected = await table.round(3, useless=(None, 1.0))
    assert (await waiting).group_ids == tuple(expected)


async def test_d_rewards_that_differ_by_rounding_are_equal(make_table):
    table = await make_table()
    (group, *_), maker = (await table.run.claim(groups=1)).groups, table.maker
    for member, reward in enumerate((0.1 + 0.2, 0.3)):
        await table.run.buffer.submit(maker.play(group.group_id, member, "0.0", reward=reward), "w")
    waiting = table.ask(1)
    async with asyncio.timeout(10):
        while (await table.run.buffer.counters()).filtered < 2:
            await asyncio.sleep(0.002)
    table.stop = True
    assert await waiting is None


async def test_e_nothing_but_failures_are_called_failed_not_uninformative(make_table):
    table = await make_table()
    waiting = table.ask(1)
    async with asyncio.timeout(20):
        while not waiting.done():
            for group in (await table.run.claim(groups=PER_ROUND)).groups:
                for member in range(2):
                    await table.run.buffer.submit(table.maker.break_down(group.group_id, member), "w")
            await asyncio.sleep(0)
    with pytest.raises(RunFailedError) as caught:
        await waiting
    assert "failed (trajectories by kind: " in str(caught.value)
    assert "timeout: " in str(caught.value)
    assert "uninformative" not in str(caught.value)


async def test_failures_of_an_earlier_life_do_not_count(make_table):
    table = await make_table()
    for _ in range(20):
        for group in (await table.run.claim(groups=PER_ROUND)).groups:
            for member in range(2):
                await table.run.buffer.submit(table.maker.break_down(group.group_id, member), "w")
    waiting = table.ask(1)
    await table.round(3)
    assert len((await waiting).group_ids) == 3
