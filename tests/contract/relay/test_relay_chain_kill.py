"""Kill -9 of any relay at any moment of a broadcast: every survivor ends with the newest version, and none is ever torn.

Real processes, TCP by ZeroMQ and shared memory, a real Redis for the heartbeats; one store a simulated machine.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from laminar.errors import RelayError
from laminar.types import WeightVersion
from relay.publisher import Publisher
from relay.store import VersionStore

pytestmark = pytest.mark.e2e

NAMES = ("master", "a", "b", "c", "d")
NUM_VALUES = 300_000
CHUNK_BYTES = 32_768
BYTES_PER_SECOND = 4e6
"""1.2 MB through a throttled chain takes about a third of a second: room for a kill."""


class Relays:
    """Relay processes, one a machine, and the trainer's publisher beside the master."""

    def __init__(self, root: Path, redis_url: str, model_files: Path, transport: str) -> None:
        script = Path(__file__).with_name("relay_child.py")
        self._forker = subprocess.Popen(
            [sys.executable, str(script), str(root), redis_url, str(BYTES_PER_SECOND), transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.stores = {name: VersionStore(root / name, "run", name, mapping_readers=1) for name in NAMES}
        (root / "master").mkdir()
        self.publisher = Publisher(self.stores["master"], model_files, chunk_bytes=CHUNK_BYTES)
        self.pids: dict[str, int] = {}
        for name in NAMES:
            self.start(name)

    def _ask(self, command: str) -> int:
        self._forker.stdin.write(command + "\n")
        self._forker.stdin.flush()
        return int(self._forker.stdout.readline())

    def start(self, name: str) -> None:
        self.pids[name] = self._ask(f"start {name} {int(name == 'master')}")

    def kill(self, name: str) -> None:
        pid = self.pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        assert self._ask(f"reap {pid}") == signal.SIGKILL, f"{name} had ended by itself"

    def publish(self, number: int) -> WeightVersion:
        version = WeightVersion(0, number)
        deadline = time.monotonic() + 20
        while self.publisher.publish(version, [("a", torch.full((NUM_VALUES,), float(number)))]).skipped:
            assert time.monotonic() < deadline, "no slot of the master came free"
            time.sleep(0.01)
        return version

    def all_reach(self, version: WeightVersion, check_whole) -> None:
        """Wait until every living relay's store has the version as its newest, whole."""
        deadline = time.monotonic() + 30
        for name in self.pids:
            while self.stores[name].newest() != version:
                assert time.monotonic() < deadline, f"{name} holds {self.stores[name].newest()}, not {version}"
                time.sleep(0.005)
            check_whole(self.stores[name], version)

    def close(self) -> None:
        self.publisher.close()
        self._forker.stdin.close()
        self._forker.wait(20)
        self._forker.stdout.close()


class Reader(threading.Thread):
    """Leases the newest version of one store after another, and looks at every byte of it."""

    def __init__(self, stores: dict[str, VersionStore], check_whole) -> None:
        super().__init__()
        self._stores, self._check = stores, check_whole
        self.stopping = threading.Event()
        self.num_read = 0
        self.problems: list[str] = []

    def run(self) -> None:
        while not self.stopping.wait(0.005):
            for name, store in self._stores.items():
                version = store.newest()
                try:
                    if version is not None:
                        self._check(store, version)
                        self.num_read += 1
                except RelayError as error:
                    if "lease the newest" not in str(error):  # it went between the two calls
                        self.problems.append(f"{name} {version}: {error}")
                except (AssertionError, OSError) as error:
                    self.problems.append(f"{name} {version}: {error!r}")


@pytest.fixture(scope="module", params=["zmq", "auto"])
def relays(valkey, tmp_path_factory, request):
    model_files = tmp_path_factory.mktemp("model")
    (model_files / "config.json").write_text('{"model_type": "llama"}')
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        relays = Relays(Path(root), valkey.url, model_files, request.param)
        yield relays
        relays.close()


def kill_during_a_broadcast(relays: Relays, check_whole, seed: int, victim: str | None = None) -> None:
    """Kill one relay at a seeded moment; sometimes publish again at once. Then bring it back."""
    rng = random.Random(seed)
    number = (relays.stores["master"].newest() or WeightVersion(0, 0)).number + 1
    victim = victim or rng.choice(NAMES)
    version = relays.publish(number)
    time.sleep(rng.uniform(0, 1.2 * NUM_VALUES * 4 / BYTES_PER_SECOND))  # the seeded moment
    relays.kill(victim)
    if rng.random() < 0.5:
        version = relays.publish(number + 1)
    if victim == "master":
        relays.start(victim)  # in place, on its slots; what had not left before is finished from there
    relays.all_reach(version, check_whole)
    if victim != "master":
        relays.start(victim)
        relays.all_reach(version, check_whole)


@pytest.fixture
def reader(relays, check_whole):
    """Reads all the time; the test fails if a version was ever torn."""
    reader = Reader(relays.stores, check_whole)
    reader.start()
    yield reader
    reader.stopping.set()
    reader.join()
    assert reader.problems == []
    assert reader.num_read > 0


@pytest.mark.parametrize(("seed", "victim"), [(0, "a"), pytest.param(1, "master", marks=pytest.mark.slow)])
def test_survivors_of_a_killed_relay_end_with_the_newest_whole_version(relays, reader, check_whole, seed, victim):
    kill_during_a_broadcast(relays, check_whole, seed, victim)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_survivors_end_with_the_newest_whole_version_whenever_any_relay_is_killed(relays, reader, check_whole, seed):
    kill_during_a_broadcast(relays, check_whole, seed)
