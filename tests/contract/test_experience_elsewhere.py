"""Servers of other people: Redis 7, passwords, TLS, sockets; connections that are cut; rewrites of the append-only file."""

import asyncio
import contextlib
import dataclasses
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from laminar.errors import EnvironmentSetupError
from laminar.experience.client import check_server, connect
from laminar.experience.partial import PartialPiece, PartialPool, PartialTurn
from laminar.experience.server import EmbeddedServer
from laminar.experience.store import ExperienceStore
from laminar.types import EvictionReason, WeightVersion, sampled

PASSWORD = "opensesame"


@contextlib.contextmanager
def redis_server(folder: Path, *flags: str, url: str) -> Iterator[str]:
    """A running Redis 7 with an append-only file, ended at exit; `url` is what it is reached by."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "redis.log"
    process = subprocess.Popen(
        [binary, "--dir", str(folder), "--save", "", "--appendonly", "yes", "--requirepass", PASSWORD, *flags],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + 20
    with redis.Redis.from_url(url, socket_timeout=5, retry=None) as probe:
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            try:
                probe.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.01)
    pytest.fail(f"the server did not answer within 20 s:\n{log.read_text()}")


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_certificates(folder: Path) -> None:
    """A certificate authority, and a server certificate for 127.0.0.1 that it has signed: ca.crt, server.crt, server.key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test", "-days", "2")
    openssl("req", *new_key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        "x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
        "-extfile", "names", "-out", "server.crt", "-days", "2",
    )  # fmt: skip


async def whole_story(make_run, trajectory_maker, url):
    """A run's life on a server: claim, appends, hand-over, submit, step, eviction, restore."""
    client = await connect(url)
    await check_server(client)
    run = await make_run(store=ExperienceStore(client, "elsewhere"), group_size=2)
    ready = await run.ready("0.0", groups=2)
    group = (await run.claim("0.0", groups=1)).groups[0]
    pool = PartialPool(run.store)
    turn = PartialTurn(0, 5, (sampled([1, 2], [-0.5, -0.25], WeightVersion(0, 0)),))
    assert await pool.append([PartialPiece(group.group_id, 0, 0, group.claim, 0, (turn,))]) == ["appended"]
    await run.step(1, ready)
    await run.pool.reap(ahead_seconds=3600)
    heir = (await run.claim("0.1", groups=1, worker="v")).groups[0]
    assert (await pool.adopt(heir.group_id, heir.claim))[0].turns == (turn,)
    played = [trajectory_maker.play(heir.group_id, member, "0.0", "0.1") for member in (0, 1)]
    assert await run.buffer.submit_many([*played, played[0]], "v") == ["accepted", "accepted", "duplicate"]
    assert await run.buffer.fetch([heir.group_id]) == [tuple(played)]
    await run.buffer.evict([heir.group_id], EvictionReason.STALE, reissue=True)
    frontier = await run.buffer.frontier()
    report = await run.buffer.restore(1, 1, frontier)
    assert (report.kept, report.reissued) == (0, 1)
    assert (await run.buffer.counters()).is_balanced
    await client.aclose()


async def test_redis_7_over_tcp_with_a_password(make_run, trajectory_maker, tmp_path):
    port = free_port()
    with redis_server(tmp_path, "--port", str(port), url=f"redis://:{PASSWORD}@127.0.0.1:{port}") as url:
        await whole_story(make_run, trajectory_maker, url)
        with pytest.raises(EnvironmentSetupError) as caught:
            await connect(f"redis://:wrong@127.0.0.1:{port}")
        assert "wrong" not in str(caught.value)


async def test_redis_7_over_a_socket(make_run, trajectory_maker, tmp_path):
    path = tmp_path / "s"
    with redis_server(tmp_path, "--port", "0", "--unixsocket", str(path), url=f"unix://:{PASSWORD}@{path}") as url:
        await whole_story(make_run, trajectory_maker, url)


async def test_redis_7_over_tls_whose_certificate_is_checked(make_run, trajectory_maker, tmp_path):
    make_certificates(tmp_path)
    port = free_port()
    names = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
    files = [part for name, file in names.items() for part in (f"--tls-{name}-file", str(tmp_path / file))]
    address = f"rediss://:{PASSWORD}@127.0.0.1:{port}"
    flags = ("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", *files)
    with redis_server(tmp_path, *flags, url=f"{address}?ssl_ca_certs={tmp_path / 'ca.crt'}") as url:
        await whole_story(make_run, trajectory_maker, url)
        with pytest.raises(EnvironmentSetupError, match="certificate"):
            await connect(address)  # signed by nobody this machine knows


async def test_bundled_server_over_loopback(make_run, trajectory_maker, tmp_path):
    with EmbeddedServer(tmp_path) as server:
        await whole_story(make_run, trajectory_maker, server.tcp_url)


class Cutter:
    """Passes bytes to a server, and cuts a connection once its request has gone out, before the answer comes back."""

    def __init__(self, target):
        self._target = target
        self.cut_next = 0
        self.num_cut = 0

    @contextlib.asynccontextmanager
    async def listening(self, path):
        async with await asyncio.start_unix_server(self._serve, path):
            yield

    async def _serve(self, reader, writer):
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._target)

        async def requests():
            while data := await reader.read(65536):
                upstream_writer.write(data)
                await upstream_writer.drain()

        forward = asyncio.create_task(requests())
        try:
            while data := await upstream_reader.read(65536):
                if self.cut_next:
                    self.cut_next -= 1
                    self.num_cut += 1
                    break
                writer.write(data)
                await writer.drain()
        finally:
            forward.cancel()
            for stream in (writer, upstream_writer):
                stream.close()


async def test_a_claim_and_a_submit_whose_answers_are_cut_off_take_effect_once(make_run, valkey, trajectory_maker, tmp_path):
    direct = await connect(valkey.url)
    cutter = Cutter(str(valkey.socket_path))
    async with cutter.listening(str(tmp_path / "c")):
        password = valkey.url.removeprefix("unix://:").partition("@")[0]
        client = await connect(f"unix://:{password}@{tmp_path / 'c'}")
        run = await make_run(store=ExperienceStore(client, f"cut-{tmp_path.name}"), group_size=2, max_staleness=2)
        await run.claim("0.0", groups=0)  # the script is there, so that the next answer is the claim's own
        cutter.cut_next = 1
        claim = await run.claim("0.0", groups=3)
        assert cutter.num_cut == 1
        assert len(claim.groups) == 3
        counters = await run.buffer.counters()
        assert (counters.admitted, counters.running) == (6, 6)
        assert [h.owner for h in (await run.buffer.peek()).headers] == ["w"] * 3
        await run.finish(claim.groups[:1], "0.0")
        cutter.cut_next = 1
        await run.finish(claim.groups[1:], "0.0")
        assert cutter.num_cut == 2
        counters = await run.buffer.counters()
        assert (counters.buffered, counters.running) == (6, 0)
        assert counters.is_balanced
        await client.aclose()
    await direct.aclose()


async def test_rewriting_the_append_only_file_under_traffic_loses_nothing(make_run, tmp_path):
    with EmbeddedServer(tmp_path) as server:
        client = await connect(server.url)
        run = await make_run(store=ExperienceStore(client, "rewrite"), group_size=4, max_staleness=None)
        ready = []
        for _ in range(12):
            with contextlib.suppress(redis.ResponseError):  # the last rewrite is still under way
                await client.bgrewriteaof()
            ready += await run.ready("0.0", groups=10)
        await run.step(1, ready[:20])
        before = await run.buffer.fetch(ready[20:]), await run.buffer.peek()
        async with asyncio.timeout(20):
            while (persistence := await client.info("persistence"))["aof_rewrite_in_progress"]:
                await asyncio.sleep(0.01)
        assert persistence["aof_last_bgrewrite_status"] == "ok"
        assert persistence["aof_rewrites"] >= 1
        await client.aclose()
    with EmbeddedServer(tmp_path) as server:
        client = await connect(server.url)
        run = await make_run(store=ExperienceStore(client, "rewrite"), group_size=4, max_staleness=None, opened=False)
        groups, snapshot = before
        reborn = dataclasses.replace(snapshot, is_open=False)  # a server's new life is opened by the trainer
        assert (await run.buffer.fetch(ready[20:]), await run.buffer.peek()) == (groups, reborn)
        await client.aclose()
