"""Whole relays that find each other through Redis: heartbeats, places, the advice to the publisher."""

import asyncio

import pytest
import torch

from laminar.types import WeightVersion
from relay.directory import Directory, RelayStatus
from relay.link import Credentials, HopLimits
from relay.publisher import Publisher
from relay.puller import Puller
from relay.server import Chained, Relay
from relay.store import VersionStore
from relay.transports.memory import MemoryNetwork

LIMITS = HopLimits(alive_seconds=0.02, retry_seconds=0.02)


async def eventually(condition, seconds: float = 10.0):
    async with asyncio.timeout(seconds):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


@pytest.fixture
async def start(valkey, run_id, tmp_path):
    """Start whole relays of one run."""
    network, running = MemoryNetwork(), []

    async def start_relay(name: str, *, is_master: bool = False, reports: list | None = None):
        (tmp_path / name).mkdir(exist_ok=True)
        store = VersionStore(tmp_path / name, run_id, name, mapping_readers=1)
        report = (lambda _: None) if reports is None else reports.append
        credentials = Credentials(run_id, name, "secret")
        chained = Chained(network.transport(name), credentials, is_master, LIMITS, report)
        relay = Relay(store, valkey.url, chained, heartbeat_seconds=0.02, ttl_seconds=2.0)
        await relay.start()
        running.append((relay, asyncio.create_task(relay.run())))
        return relay, store

    yield start_relay
    for relay, _ in running:
        await relay.stop()
    await asyncio.gather(*(task for _, task in running))


def publisher_of(store, tmp_path) -> Publisher:
    (tmp_path / "config.json").write_text("{}")
    return Publisher(store, tmp_path)


async def test_relays_find_each_other_and_a_version_reaches_the_last(start, tmp_path):
    _, master_store = await start("master", is_master=True)
    publisher = publisher_of(master_store, tmp_path)
    reports = []
    _, first = await start("first")
    last, last_store = await start("last", reports=reports)
    version = WeightVersion(0, 1)
    publisher.publish(version, [("a", torch.ones(100_000))])
    await eventually(lambda: first.newest() == last_store.newest() == version)
    status = await last.status()
    assert (status.newest, status.address, status.is_master, status.is_blocked) == ("0.1", "last", False, False)
    async with asyncio.timeout(10):  # it takes from the master until it has heard of the first
        while ((status := await last.status()).upstream, status.carrier) != ("first", "memory"):
            await asyncio.sleep(0.005)
    assert [report.version for report in reports] == ["0.1"]
    publisher.close()


async def test_the_master_tells_its_publisher_which_pieces_the_chain_wants(start, tmp_path):
    _, master_store = await start("master", is_master=True)
    publisher = publisher_of(master_store, tmp_path)
    await start("first")
    await start("last")
    assert master_store.advised_chunk_bytes() is None
    publisher.publish(WeightVersion(0, 1), [("a", torch.ones(300_000))])
    advice = await eventually(master_store.advised_chunk_bytes)
    assert advice % 65536 == 0
    assert 256 * 1024 <= advice <= 16 * 1024**2
    publisher.close()


def test_the_publisher_follows_the_advice(tmp_path):
    store = VersionStore(tmp_path, "run", "master")
    publisher = publisher_of(store, tmp_path)
    publisher.publish(WeightVersion(0, 1), [("a", torch.ones(300_000))])
    store.advise_chunk_bytes(5 * 65536)
    publisher.publish(WeightVersion(0, 2), [("a", torch.ones(300_000))])
    manifest = Puller(store).manifest(WeightVersion(0, 2))
    assert (manifest.chunk_bytes, len(manifest.checksums)) == (327_680, 4)  # 1.2 MB and a header
    publisher.close()


async def test_a_restarted_relay_gets_its_old_place_back(valkey, run_id):
    def status(name: str) -> RelayStatus:
        return RelayStatus(name, "host", 1, "folder", "", (), 0.0)

    directories = {name: Directory(valkey.url, run_id, name, ttl_seconds=5.0) for name in ("a", "b")}
    for name, place in (("a", 10.0), ("b", 20.0)):
        directories[name].joined = place
        await directories[name].beat(status(name))
    again = Directory(valkey.url, run_id, "a", ttl_seconds=5.0)
    assert again.joined > 20.0
    await again.beat(status("a"))
    assert again.joined == 10.0
    assert [(other.node_id, other.joined) for other in again.others] == [("b", 20.0)]
    for directory in (*directories.values(), again):
        await directory.close()


async def test_with_redis_lost_the_last_list_is_kept(run_id, caplog):
    directory = Directory("redis://127.0.0.1:1", run_id, "a", ttl_seconds=5.0)
    known = (RelayStatus("b", "host", 1, "folder", "", (), 0.0),)
    directory.others = known
    for _ in range(2):
        await directory.beat(RelayStatus("a", "host", 1, "folder", "", (), 0.0))
    assert directory.others == known
    assert len(caplog.records) == 1


def test_a_heartbeat_survives_the_wire():
    place = {"address": "1.2.3.4:5", "is_master": True, "upstream": "m", "carrier": "TCP", "receiving": "0.4", "joined": 2.0}
    status = RelayStatus("n", "host", 7, "folder", "0.3", ("0.2", "0.3"), 1.5, **place)
    assert RelayStatus.from_json(status.to_json()) == status
