"""Rule 3: a reader never sees a torn version, whenever the publisher dies."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from laminar.errors import RelayError
from laminar.types import WeightVersion
from relay.puller import Puller, read_manifest, verify_folder
from relay.store import WEIGHTS_NAME, VersionStore

pytestmark = pytest.mark.e2e


class PublisherChild:
    def __init__(self, root: Path, model_files: Path) -> None:
        script = Path(__file__).with_name("relay_publisher_child.py")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(root), str(model_files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, command: str) -> int:
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def store():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        yield VersionStore(Path(root), "kill", "node")


@pytest.fixture(scope="module")
def child(store, tmp_path_factory):
    model_files = tmp_path_factory.mktemp("model")
    (model_files / "config.json").write_text("{}")
    child = PublisherChild(store.root, model_files)
    yield child
    child.close()


def check_whole(folder: Path, version: WeightVersion) -> None:
    verify_folder(folder)
    manifest = read_manifest(folder)
    assert manifest.version == version
    data = (folder / WEIGHTS_NAME).read_bytes()
    for spec in manifest.tensors.values():
        values = np.frombuffer(data, np.float32, spec.nbytes // 4, spec.offset)
        assert (values == version.number).all()


class Reader(threading.Thread):
    """Leases the newest version again and again, and looks at every byte of it."""

    def __init__(self, store: VersionStore) -> None:
        super().__init__()
        self._puller = Puller(store)
        self._stopping = threading.Event()
        self.num_read = 0
        self.problems: list[str] = []

    def run(self) -> None:
        while not self._stopping.wait(0.001):
            version = self._puller.latest()
            if version is None:
                continue
            with ExitStack() as stack:
                try:
                    folder = stack.enter_context(self._puller.lease(version))
                except RelayError:
                    continue  # went between the two calls: take the newest
                try:
                    check_whole(folder, version)
                except (RelayError, AssertionError, OSError) as error:
                    self.problems.append(f"{version}: {error!r}")
                self.num_read += 1

    @contextmanager
    def reading(self):
        self.start()
        try:
            yield
        finally:
            self._stopping.set()
            self.join()


def test_publisher_killed_at_every_single_step_leaves_whole_versions_only(store, child):
    reader = Reader(store)
    deaths = 0
    newest = None
    with reader.reading():
        for event in range(1, 1000):
            status = child.ask(f"step {event} {event}")
            complete = store.versions()
            for version in complete:
                with store.lease(version) as folder:
                    check_whole(folder, version)
            assert newest is None or max(complete) >= newest, "a complete version was lost"
            newest = max(complete, default=None)
            if status == 0:
                break
            assert status == signal.SIGKILL
            deaths += 1
    assert reader.problems == []
    assert reader.num_read > 0
    assert deaths > 40, "the hook saw fewer steps than a publish has"
    assert newest == WeightVersion(0, event)


def test_publisher_killed_at_random_moments_never_shows_a_reader_a_torn_version(store, child):
    rng = random.Random(0)
    reader = Reader(store)
    with reader.reading():
        first = number = 1000
        for _ in range(20):
            pid = child.ask(f"loop {number}")
            seen = store.newest()
            deadline = time.monotonic() + 10
            while store.newest() in (seen, None) and time.monotonic() < deadline:
                time.sleep(0.001)  # the child must be publishing before the dice are thrown
            time.sleep(rng.uniform(0, 0.01))
            os.kill(pid, signal.SIGKILL)
            assert child.ask("reap") == signal.SIGKILL
            number = store.newest().number + 1
    assert reader.problems == []
    assert reader.num_read > 20
    assert number > first + 20
