"""The relay's process: owns the store, shows that it lives, removes what dead runs left."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
import redis
import torch

from laminar.errors import EnvironmentSetupError, RelayError
from laminar.experience.server import EmbeddedServer
from laminar.types import WeightVersion
from relay.directory import heartbeat_key
from relay.orphans import remove_orphans
from relay.publisher import Publisher
from relay.server import Relay
from relay.store import OWNER, PUBLISHER, VersionStore

NO_REDIS = "redis://127.0.0.1:1"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = EmbeddedServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def store(tmp_path):
    return VersionStore(tmp_path, "run", "node")


def publish(store: VersionStore, folder: Path, *numbers: int) -> Publisher:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    publisher = Publisher(store, folder)
    for number in numbers:
        publisher.publish(WeightVersion(0, number), [("a", torch.full((10,), float(number)))])
    return publisher


def make_old(store: VersionStore) -> None:
    hour_ago = time.time() - 3600
    for name in (f"{OWNER}.lock", "versions"):
        os.utime(store.folder / name, (hour_ago, hour_ago))


async def eventually(condition, seconds: float = 5.0):
    async with asyncio.timeout(seconds):
        while not (value := condition()):
            await asyncio.sleep(0.01)
    return value


async def test_heartbeat_says_what_the_store_holds_and_expires_after_the_relay_ends(server, store, tmp_path):
    client = redis.Redis.from_url(server.url)
    relay = Relay(store, server.url, heartbeat_seconds=0.02, ttl_seconds=0.3)
    await relay.start()
    publish(store, tmp_path / "model", 0, 1)
    running = asyncio.create_task(relay.run())
    key = heartbeat_key("run", "node")
    assert key == "laminar:run:directory:relay:node"
    beat = json.loads(await eventually(lambda: client.get(key)))
    assert beat["newest"] == "0.1"
    assert beat["pid"] == os.getpid()
    assert beat["store"] == str(store.folder)
    await relay.stop()
    await asyncio.wait_for(running, 5)
    await eventually(lambda: client.get(key) is None)


async def test_lost_redis_stops_neither_the_relay_nor_the_weights(store, tmp_path, caplog):
    relay = Relay(store, "redis://:secret@127.0.0.1:1", heartbeat_seconds=0.01)
    await relay.start()
    running = asyncio.create_task(relay.run())
    publisher = publish(store, tmp_path / "model", 0)
    await eventually(lambda: caplog.records)
    publisher.publish(WeightVersion(0, 1), [("a", torch.zeros(10))])
    assert (await relay.status()).newest == "0.1"
    assert not running.done()
    await relay.stop()
    await asyncio.wait_for(running, 5)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "no heartbeat: Redis at redis://:***@127.0.0.1:1 does not answer"
    ]


async def test_relay_removes_surplus_versions_once_their_lease_ends(store, tmp_path):
    relay = Relay(store, NO_REDIS, heartbeat_seconds=0.01)
    await relay.start()
    publisher = publish(store, tmp_path / "model", 0)
    running = asyncio.create_task(relay.run())
    with store.lease(WeightVersion(0, 0)):
        publisher.publish(WeightVersion(0, 1), [("a", torch.zeros(10))])
        assert len(store.versions()) == 2
    await eventually(lambda: store.versions() == [WeightVersion(0, 1)])
    await relay.stop()
    await running


async def test_second_living_relay_of_a_store_is_refused(store):
    first, second = Relay(store, NO_REDIS), Relay(store, NO_REDIS)
    await first.start()
    with pytest.raises(RelayError, match="already has a living owner"):
        await second.start()
    await first.stop()
    await second.start()


async def test_restarted_relay_finds_its_versions_again(store, tmp_path):
    first = Relay(store, NO_REDIS)
    await first.start()
    publish(store, tmp_path / "model", 0, 1)
    await first.stop()
    second = Relay(store, NO_REDIS)
    await second.start()
    assert (await second.status()).versions == ("0.1",)


async def test_relay_refuses_a_model_that_does_not_fit_before_it_creates_anything(store):
    with pytest.raises(EnvironmentSetupError, match="need 2,000,000,008,388,608 bytes"):
        await Relay(store, NO_REDIS).start(file_bytes=10**15)
    assert not store.folder.exists()


async def test_removing_the_store_leaves_nothing(store, tmp_path):
    relay = Relay(store, NO_REDIS)
    await relay.start()
    publish(store, tmp_path / "model", 0).close()
    await relay.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


async def test_starting_relay_removes_the_store_of_a_dead_run(tmp_path):
    dead = VersionStore(tmp_path, "dead", "node")
    dead.hold(OWNER).release()
    publish(dead, tmp_path / "model", 0).close()
    make_old(dead)
    (tmp_path / ".removed-laminar-older-node-1").mkdir()
    await Relay(VersionStore(tmp_path, "run", "node"), NO_REDIS).start()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["laminar-run-node", "model"]


@pytest.mark.parametrize("role", [OWNER, PUBLISHER])
def test_store_whose_owner_or_publisher_lives_is_no_orphan(store, role):
    store.hold(OWNER).release()
    with store.hold(role):
        make_old(store)
        assert remove_orphans(store.root) == []
    make_old(store)
    assert remove_orphans(store.root) == [store.folder]


def test_another_users_store_that_may_not_be_looked_into_is_left_alone(store, monkeypatch):
    """As under a umask of 077, and as only a user without privileges sees it: root may look anywhere."""
    store.hold(OWNER).release()
    make_old(store)
    look = Path.stat

    def forbid(path, **options):
        if path.name == f"{OWNER}.lock":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", forbid)
    assert remove_orphans(store.root) == []


def test_store_that_was_just_in_use_is_no_orphan_yet(store):
    store.hold(OWNER).release()
    assert remove_orphans(store.root) == []
    assert remove_orphans(store.root, orphan_seconds=0) == [store.folder]


def test_folders_that_no_relay_ever_owned_are_left_alone(tmp_path):
    (tmp_path / "laminar-notes").mkdir()
    (tmp_path / "laminar-file").write_text("mine")
    (tmp_path / "laminar-other" / "versions").mkdir(parents=True)
    assert remove_orphans(tmp_path, orphan_seconds=0) == []
    assert len(list(tmp_path.iterdir())) == 3
