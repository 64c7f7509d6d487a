"""The bundled server and connections: start, restart, death of the starter, refusals, outages, full memory."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import redis

from laminar.errors import ConfigError, EnvironmentSetupError, ExperienceError
from laminar.experience.client import check_server, connect, hide_password, keep_cancellation
from laminar.experience.server import EmbeddedServer
from laminar.experience.store import ExperienceStore
from laminar.types import Chain, Purpose, SamplingParameters, Trajectory, WeightVersion, sampled, trajectory_id


def server_pid(server):
    with redis.Redis.from_url(server.url) as probe:
        return int(probe.info("server")["process_id"])


def gone_within(pid, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def ends_within(server, seconds):
    deadline = time.monotonic() + seconds
    while server.is_running and time.monotonic() < deadline:
        time.sleep(0.01)
    return not server.is_running


async def test_server_is_private_never_evicts_and_writes_an_append_only_file(server, client):
    await check_server(client)
    settings = await client.config_get("append*", "maxmemory-policy", "bind", "save")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["bind"] == "127.0.0.1"
    assert server.socket_path.stat().st_mode & 0o077 == 0
    with pytest.raises(EnvironmentSetupError):
        await connect(f"unix://{server.socket_path}")  # without the password
    over_tcp = await connect(server.tcp_url)
    assert await over_tcp.ping()
    await over_tcp.aclose()


async def test_restart_on_the_same_folder_finds_the_data_again(tmp_path):
    for expected in (None, b"kept"):
        with EmbeddedServer(tmp_path) as server:
            client = await connect(server.url)
            assert await client.get("key") == expected
            await client.set("key", "kept")
            await client.aclose()


@pytest.mark.parametrize(("lost_bytes", "kept"), [(0, {b"a", b"b", b"c"}), (30, {b"a", b"b"})])
async def test_an_append_only_file_with_a_torn_end_is_cut_there(server, client, kill, append_only_file, lost_bytes, kept):
    """As after a loss of power: the file system had given the file its length, and not yet its content."""
    for key in "abc":
        await client.set(key, "x" * 50)
    kill(server)
    content = append_only_file().read_bytes()
    append_only_file().write_bytes(content[: len(content) - lost_bytes] + bytes(4096))
    server.start()
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(redis.ConnectionError):  # the connection to the one that was killed
                assert set(await client.keys()) == kept
                return


def test_data_that_cannot_be_read_are_an_error_that_says_they_may_be_moved_away(server, kill, tmp_path):
    kill(server)
    (base,) = (tmp_path / "redis" / "appendonlydir").glob("*.base.rdb")
    base.write_bytes(bytes(88))
    with pytest.raises(EnvironmentSetupError, match=r"Bad file format.*move .*/appendonlydir away"):
        server.start()


async def test_long_folder_gets_a_socket_with_a_short_path(tmp_path):
    folder = tmp_path / ("long" * 30)
    with EmbeddedServer(folder) as server:
        assert len(os.fsencode(server.socket_path)) < 108
        client = await connect(server.url)
        assert await client.ping()
        await client.aclose()
    assert not server.socket_path.exists()


def test_second_server_on_the_same_folder_is_refused(server, tmp_path):
    second = EmbeddedServer(tmp_path / "redis", stop_seconds=0.1)
    with pytest.raises(EnvironmentSetupError, match="another server still uses"):
        second.start()
    assert server.is_running


def test_server_dies_with_a_starter_that_is_killed(tmp_path):
    code = (
        "import sys, time, redis; from pathlib import Path; from laminar.experience.server import EmbeddedServer\n"
        "server = EmbeddedServer(Path(sys.argv[1])); server.start()\n"
        "print(redis.Redis.from_url(server.url).info('server')['process_id'], flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid = int(starter.stdout.readline())
    assert psutil.pid_exists(pid)
    starter.kill()
    starter.wait(10)
    starter.stdout.close()
    assert gone_within(pid, 10)


def test_server_dies_with_its_guard(server):
    pid = server_pid(server)
    psutil.Process(pid).parent().kill()
    assert gone_within(pid, 10)


def test_stop_ends_the_process_and_may_be_repeated(tmp_path):
    server = EmbeddedServer(tmp_path)
    server.start()
    pid = server_pid(server)
    server.stop()
    server.stop()
    assert not server.is_running
    assert gone_within(pid, 0.1)


async def test_requests_outlast_a_killed_and_restarted_server(server, client, make_run):
    run = await make_run(store=ExperienceStore(client, "outage", outage_seconds=30))
    first = await run.ready("0.0", groups=3)
    os.kill(server_pid(server), signal.SIGKILL)
    assert await asyncio.to_thread(ends_within, server, 10)
    waiting = asyncio.create_task(run.claim("0.0", groups=1))
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    await asyncio.to_thread(server.start)
    assert (await waiting).refused == "not_ready"  # until the trainer, who knows what it trained, restores the run
    assert (await run.buffer.restore(1, 0)).kept == 3
    assert len((await run.claim("1.0", groups=1)).groups) == 1
    assert [len(members) for members in await run.buffer.fetch(first)] == [1, 1, 1]
    assert (await run.buffer.counters()).is_balanced


async def test_outage_beyond_its_deadline_is_an_error_that_names_the_request(server, client):
    store = ExperienceStore(client, "outage", outage_seconds=0.1)
    server.stop()
    with pytest.raises(ExperienceError, match="Redis has been out of reach for 0 s at request 'peek'"):
        await store.run("peek")


@pytest.fixture
async def fill_disk(client, tmp_path):
    """Make the server refuse writes, as with a full disk, until the returned function is called."""

    async def save(outcome):
        await client.bgsave()
        async with asyncio.timeout(10):
            while (await client.info("persistence"))["rdb_last_bgsave_status"] != outcome:
                await asyncio.sleep(0.01)

    async def fill():
        (tmp_path / "redis" / "dump.rdb").mkdir()
        await client.config_set("save", "3600 1")
        await save("err")
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            await client.set("a", 1)

    async def make_room():
        (tmp_path / "redis" / "dump.rdb").rmdir()
        await save("ok")

    return fill, make_room


async def test_requests_wait_for_a_server_whose_disk_is_full(client, make_run, fill_disk):
    run = await make_run(store=ExperienceStore(client, "full", outage_seconds=30))
    group = (await run.claim("0.0", groups=1)).groups[0].group_id
    fill, make_room = fill_disk
    await fill()
    waiting = [
        asyncio.create_task(request)
        for request in (run.claim("0.0", groups=1), run.buffer.submit(long_trajectory(group, 10), "w"))
    ]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert not done
    await make_room()
    claim, outcome = await asyncio.gather(*waiting)
    assert (len(claim.groups), outcome) == (1, "accepted")


async def test_a_disk_that_stays_full_is_an_error_that_names_it(client, make_run, fill_disk):
    await fill_disk[0]()
    with pytest.raises(ExperienceError, match=r"Redis has been unable to write its file for 0 s at request 'configure'"):
        await make_run(store=ExperienceStore(client, "full", outage_seconds=0.1))


async def test_server_that_may_evict_is_refused(client):
    await client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(EnvironmentSetupError, match=r"allkeys-lru.*config set maxmemory-policy noeviction"):
        await check_server(client)


async def test_unreachable_server_is_one_sentence_without_the_password():
    with pytest.raises(EnvironmentSetupError) as caught:
        await connect("redis://user:secret@127.0.0.1:1/0")
    assert "redis://user:***@127.0.0.1:1/0" in str(caught.value)
    assert "embedded" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_malformed_url_is_a_config_error():
    with pytest.raises(ConfigError, match=r"experience\.redis_url 'http://somewhere': write a URL"):
        await connect("http://somewhere")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:secret@host:6379", "redis://:***@host:6379"),
        ("rediss://me:se:cr@et@host", "rediss://me:***@host"),
        ("unix:///run/redis.sock?db=1&password=secret", "unix:///run/redis.sock?db=1&password=***"),
    ],
)
def test_password_is_hidden_in_every_kind_of_url(url, shown):
    assert hide_password(url) == shown


def long_trajectory(group_id, num_tokens):
    chain = Chain((sampled(np.arange(num_tokens), np.zeros(num_tokens), WeightVersion(0, 0)),))
    return Trajectory(
        trajectory_id=trajectory_id(group_id, 0),
        group_id=group_id,
        prompt_id="",
        member=0,
        attempt=1,
        purpose=Purpose.TRAIN,
        sampling=SamplingParameters(temperature=1.0, max_new_tokens=num_tokens, seed=0),
        chains=(chain,),
        finish_reason=None,
        reward=0.0,
    )


async def test_case_d20b_producer_waits_visibly_while_memory_is_full_and_nothing_is_lost(client, make_run):
    run = await make_run(
        store=ExperienceStore(client, "full"), prompts_per_step=5, max_staleness=None, bytes_per_group=50_000
    )
    claimed = [group.group_id for group in (await run.claim("0.0", groups=100)).groups]
    used = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory", used + 60 * 57_000)
    producer = asyncio.create_task(run.buffer.submit_many([long_trajectory(group, 6250) for group in claimed], "w"))
    trained, step, most_ready = [], 0, 0
    while len(trained) < 100:
        headers = (await run.buffer.peek()).headers
        ready = [header.group_id for header in headers if header.state == "ready"]
        most_ready = max(most_ready, len(ready))
        if len(ready) < 5 or (step == 0 and not await memory_is_full(client, producer)):
            await asyncio.sleep(0)
            continue
        step += 1
        await run.buffer.take(0, step, ready[:5])
        trained += [t.group_id for members in await run.buffer.fetch(ready[:5]) for t in members]
        await run.buffer.publish(0, step)
        await run.buffer.ack(0, step)
    assert set(await producer) == {"accepted"}
    assert sorted(trained) == claimed
    assert most_ready < 100
    counters = await run.buffer.counters()
    assert (counters.trained, counters.is_balanced) == (100, True)
    assert counters.waited_for_memory_seconds > 0


async def memory_is_full(client, producer):
    """Whether the server has refused a write."""
    assert not producer.done()
    errors = await client.info("errorstats")
    return "errorstat_OOM" in errors


async def test_memory_that_stays_full_is_an_error_with_a_remedy(client, make_run):
    run = await make_run(store=ExperienceStore(client, "full"), memory_seconds=0.1)
    group = (await run.claim("0.0", groups=1)).groups[0].group_id
    await client.config_set("maxmemory", 1)
    with pytest.raises(ExperienceError, match=r"no memory for 1 trajectories for 0 s; raise its maxmemory"):
        await run.buffer.submit(long_trajectory(group, 10), "w")


async def test_a_cancellation_that_a_request_swallows_is_passed_on():
    """As `asyncio.wait_for` does before Python 3.12; a loop of requests would then go on for ever."""

    async def swallow(result):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return result() if result else None

    def lose_the_server():
        raise redis.ConnectionError

    for result in (None, lose_the_server):
        task = asyncio.create_task(keep_cancellation(swallow(result)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


@pytest.mark.parametrize("kind", ["command", "pipeline"])
async def test_a_cancellation_at_any_moment_of_a_request_ends_its_task(client, kind):
    """A worker beats through a pipeline: one beat that goes on after the order to end keeps the whole role alive."""

    async def ask():
        if kind == "command":
            await client.set("a", 1)
            return
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.set("a", 1)
            pipeline.get("a")
            await pipeline.execute()

    for ticks in [*range(40)] * 2:
        task = asyncio.create_task(ask())
        for _ in range(ticks):
            await asyncio.sleep(0)
        is_cancelled = task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() is is_cancelled, f"after {ticks} ticks of the event loop"


async def test_clean_up_after_a_cancellation_may_still_ask_the_server(client):
    async def work():
        try:
            await asyncio.sleep(3600)
        finally:
            await client.set("cleaned", "up")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert await client.get("cleaned") == b"up"


async def test_a_deadline_around_a_request_that_swallows_it_still_ends_it():
    async def swallow():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return 1

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await keep_cancellation(swallow())
