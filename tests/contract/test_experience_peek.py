"""What a reader that looks often sees, against one that looks for the first time."""

from laminar.experience.buffer import ExperienceBuffer
from laminar.types import EvictionReason


async def test_reader_that_looked_before_sees_what_a_new_one_sees(make_run):
    run = await make_run(prompts_per_step=4, max_staleness=None)
    for step in range(1, 5):
        first, second, *_ = await run.ready(f"0.{step - 1}", groups=4)
        await run.buffer.evict([second], EvictionReason.STALE, reissue=True)
        seen = await run.buffer.peek()
        assert seen == await ExperienceBuffer(run.store).peek()
        assert second not in seen.occurrences
        await run.step(step, [first])
    assert await run.buffer.peek() == await ExperienceBuffer(run.store).peek()


async def test_groups_that_left_are_forgotten_in_the_end(make_run):
    run = await make_run(num_prompts=10, prompts_per_step=500, max_staleness=None)
    lazy = ExperienceBuffer(run.store)
    await run.claim("0.0", groups=3)
    assert len((await lazy.peek()).headers) == 3
    for _ in range(3):
        groups = [group.group_id for group in (await run.claim("0.0", groups=450)).groups]
        await run.buffer.evict(groups, EvictionReason.STALE, reissue=False)
        await run.buffer.peek()
    assert await run.store.client.zcard(run.store.key("changes")) < 3 * 450
    assert len((await lazy.peek()).headers) == 3


async def test_keys_deleted_by_hand_are_noticed_by_a_reader_of_old(make_run):
    run = await make_run()
    await run.ready("0.0", groups=2)
    assert len((await run.buffer.peek()).headers) == 2
    await run.store.client.delete(*[key async for key in run.store.client.scan_iter(match=run.store.key("*"), count=1000)])
    assert (await run.buffer.peek()).headers == ()
    again = await make_run(store=run.store)
    await again.claim("0.0", groups=1)
    assert len((await run.buffer.peek()).headers) == 1


async def test_changes_in_the_microseconds_after_the_last_look_are_seen(make_run):
    """After the server's clock was set back, revisions rise by one a script; they have 16 digits."""
    run = await make_run(num_prompts=40, prompts_per_step=40, max_staleness=None)
    await run.claim("0.0", groups=1)
    ahead = 4_000_000_000_000_051  # the last revision, of a clock that was ahead
    await run.store.client.hset(run.store.key("run"), "revision", ahead)
    await run.buffer.peek()
    for _ in range(30):
        await run.claim("0.0", groups=1)
        assert await run.buffer.peek() == await ExperienceBuffer(run.store).peek()


async def test_prompts_left_are_those_of_all_epochs_and_those_to_be_issued_again(make_run):
    run = await make_run(num_prompts=5, max_epochs=2, max_staleness=None)
    assert (await run.buffer.peek()).prompts_left == 10
    (first, *_) = (await run.claim("0.0", groups=5)).groups
    await run.claim("0.0", groups=2)
    assert (await run.buffer.peek()).prompts_left == 3
    await run.buffer.evict([first.group_id], EvictionReason.STALE, reissue=True)
    assert (await run.buffer.peek()).prompts_left == 4
    endless = await make_run(num_prompts=5, max_epochs=None)
    assert (await endless.buffer.peek()).prompts_left is None
