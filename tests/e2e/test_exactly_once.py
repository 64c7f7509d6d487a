"""Exactly once across crashes: what was trained stays trained on the same tokens; nothing is lost, nothing trained twice."""

import os
import shutil
import signal

import pytest
import redis

from laminar.experience.server import EmbeddedServer
from trainer.audit import audit_run

pytestmark = pytest.mark.e2e

STEADY = (
    "trainer.algorithm.options.filter_zero_variance=false",
    "checkpoint.every_steps=5",
    "rollout.lease_seconds=4",
    "eval.path=''",
)
NUM_PROMPTS = 80


def assert_exactly_once(run, num_steps):
    steps = run.lines()
    assert [line["step"] for line in steps] == list(range(1, num_steps + 1))
    found = audit_run(run.folder.checkpoints, NUM_PROMPTS)
    assert (found.num_steps, found.missing_steps, found.twice, found.unaccounted) == (num_steps, (), (), ())
    assert found.counters.is_balanced
    assert found.counters.trained == num_steps * 8 * 8
    assert max(line["staleness/versions_max"] for line in steps) <= 1
    assert run.leftovers() == []


def redis_pid(run):
    """The server itself, not its guard; it overwrites its environment, so it cannot be found by the run's mark."""
    with redis.Redis.from_url(run.folder.read_state().redis_url) as client:
        return client.info("server")["process_id"]


def test_a_killed_trainer_replays_its_steps_and_no_batch_before_the_kill_changes(start):
    run = start("run.max_steps=24", *STEADY)
    run.wait_for_step(8)
    before = run.lines()
    os.kill(run.role_pid("trainer-0"), signal.SIGKILL)
    assert run.wait(240) == 0, run.text()
    assert run.lines()[: len(before)] == before
    assert "steps replayed" in run.text()
    assert ", 0 lost" in run.text()
    assert_exactly_once(run, 24)


def test_a_killed_redis_is_restarted_and_the_run_ends_with_balanced_counters(start):
    run = start("run.max_steps=24", *STEADY)
    run.wait_for_step(7)
    os.kill(redis_pid(run), signal.SIGKILL)
    run.wait_for_step(run.lines()[-1]["step"] + 5)
    os.kill(redis_pid(run), signal.SIGKILL)
    assert run.wait(240) == 0, run.text()
    assert "redis: 2" in run.text()
    assert_exactly_once(run, 24)


@pytest.mark.parametrize("key", ["headers", "outstanding"])
def test_a_living_run_whose_groups_somebody_deletes_plays_them_again(start, key):
    run = start("run.max_steps=16", *STEADY)
    run.wait_for_step(6)
    with redis.Redis.from_url(run.folder.read_state().redis_url) as client:
        assert client.delete(f"laminar:{run.folder.path.name}:{key}") == 1
    assert run.wait(240) == 0, run.text()
    assert "lineage 1 opens" in run.text()
    assert ", 0 lost" in run.text()
    assert_exactly_once(run, 16)


def test_resume_onto_an_empty_redis_replays_the_spool_and_reports_nothing_lost(start):
    run = start("run.max_steps=30", *STEADY)
    run.wait_for_step(8)
    run.process.kill()
    run.process.wait()
    run.wait_until_gone(30)
    before = run.lines()
    shutil.rmtree(run.folder.redis)
    resumed = start(resume=run.folder.path)
    assert resumed.wait(240) == 0, resumed.text()
    assert resumed.lines()[: len(before)] == before
    assert "steps replayed" in resumed.text()
    assert ", 0 lost" in resumed.text()
    assert_exactly_once(resumed, 30)


@pytest.mark.slow
def test_an_outside_redis_that_is_replaced_by_an_empty_one_is_filled_and_the_run_ends(start, tmp_path_factory):
    with EmbeddedServer(tmp_path_factory.mktemp("outside")) as server:
        run = start("run.max_steps=20", f"experience.redis_url={server.url}", *STEADY)
        run.wait_for_step(7)
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        assert run.wait(240) == 0, run.text()
    assert_exactly_once(run, 20)
