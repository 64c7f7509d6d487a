"""What publisher and puller promise each other on one machine."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from laminar.errors import ConfigError, DeadlineError, EnvironmentSetupError, InvariantError, RelayError
from laminar.types import WeightVersion
from relay.locks import FileLock
from relay.manifest import load_layout
from relay.model_files import stage_model_files
from relay.publisher import Publisher
from relay.puller import Puller
from relay.store import VersionStore


def version(text: str) -> WeightVersion:
    return WeightVersion.parse(text)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((40, 50), float(value)), "b": torch.full((7,), float(value))}


def read(folder: Path) -> float:
    with safe_open(folder / "model.safetensors", "pt") as file:
        values = {float(x) for name in file.keys() for x in file.get_tensor(name).flatten()}  # noqa: SIM118
    (value,) = values
    return value


class Machine:
    """One store with its publisher and puller."""

    def __init__(self, folder: Path, **options: int) -> None:
        self.model_files = folder / "model"
        self.model_files.mkdir()
        (self.model_files / "config.json").write_text('{"model_type": "x"}')
        (folder / "shm").mkdir(exist_ok=True)
        self.store = VersionStore(folder / "shm", "run", "node", **options)
        self.puller = Puller(self.store)
        self.publisher = Publisher(self.store, self.model_files, chunk_bytes=1000)

    def publish(self, text: str, value: float | None = None):
        return self.publisher.publish(version(text), state(version(text).number if value is None else value).items())

    def complete(self) -> list[str]:
        return [str(v) for v in self.store.versions()]

    def restart_publisher(self) -> None:
        self.publisher.close()
        self.publisher = Publisher(self.store, self.model_files, chunk_bytes=1000)


LEASE_UNTIL_TOLD = """
import sys
from pathlib import Path
from laminar.types import WeightVersion
from relay.store import VersionStore
with VersionStore(Path(sys.argv[1]), "run", "node").lease(WeightVersion(0, 0)):
    print("leased", flush=True)
    sys.stdin.readline()
"""
PAUSE_BEFORE_LOCK = """
import sys
def on_event(event, arguments):
    if event == "fcntl.flock":
        print("opened", flush=True)
        sys.stdin.readline()
sys.addaudithook(on_event)
"""


def start_reader(machine: Machine, script: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(machine.store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def roomy(tmp_path):
    return Machine(tmp_path, keep_versions=2, mapping_readers=1)


def test_published_version_is_read_back_with_its_manifest(machine):
    report = machine.publish("0.0", 3.5)
    assert (report.skipped, report.reason) == (False, "")
    assert report.bytes > 2007 * 4
    assert machine.puller.latest() == version("0.0")
    with machine.puller.lease(version("0.0")) as folder:
        assert read(folder) == 3.5
        assert folder == machine.store.folder / "versions" / "0.0"
    manifest = machine.puller.manifest(version("0.0"))
    assert (manifest.version, manifest.run_id, manifest.chunk_bytes) == (version("0.0"), "run", 1000)
    assert list(manifest.tensors) == ["a", "b"]
    machine.puller.verify(version("0.0"))


def test_a_model_file_that_is_half_written_goes_into_no_version(machine):
    (machine.store.model_files / ".arriving-tokenizer.json").write_text("half")
    machine.publish("0.0")
    assert sorted(os.listdir(machine.store.folder_of(version("0.0")))) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]


@pytest.fixture
def small(tmp_path):
    """A machine with little shared memory, and what fills it up but for so many bytes, or frees it again."""
    (tmp_path / "shm").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path / "shm")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    filler = tmp_path / "shm" / "filler"

    def fill(all_but: int | None) -> None:
        filler.unlink(missing_ok=True)
        if all_but is not None:
            filler.write_bytes(bytes(shutil.disk_usage(filler.parent).free - all_but))

    machine = Machine(tmp_path)
    yield machine, fill
    machine.publisher.close()
    subprocess.run(["umount", "--lazy", str(tmp_path / "shm")], check=True)


def test_full_memory_at_a_versions_appearance_says_so_and_leaves_nothing_half_made(small):
    machine, fill = small
    machine.publish("0.0")
    fill(0)
    for _ in range(2):
        with pytest.raises(EnvironmentSetupError, match=r"manifest and folder need [\d,]+ bytes in .*--shm-size"):
            machine.publish("0.1")
    assert os.listdir(machine.store.folder / "versions") == ["0.0"]
    fill(None)
    machine.publish("0.1")
    assert machine.complete()[-1] == "0.1"


def test_full_memory_for_the_models_files_says_so_and_keeps_the_old_ones(small):
    machine, fill = small
    (machine.model_files / "tokenizer.json").write_text("x" * 100_000)
    fill(50_000)
    with pytest.raises(EnvironmentSetupError, match=r"the model's files need 100,\d+ bytes in .*--shm-size"):
        stage_model_files(machine.model_files, machine.store.model_files)
    assert os.listdir(machine.store.model_files) == ["config.json"]
    fill(None)
    stage_model_files(machine.model_files, machine.store.model_files)
    assert sorted(os.listdir(machine.store.model_files)) == ["config.json", "tokenizer.json"]


def test_slots_are_refused_where_nothing_is_left_for_what_goes_with_them(small):
    machine, fill = small
    fill(2 * 12_288 + 8_192)  # the slots alone would fit
    with pytest.raises(EnvironmentSetupError, match="the weight slots need"):
        machine.publish("0.0")
    assert machine.store.slot_lengths() == []


def test_nothing_is_there_before_the_first_publish(tmp_path):
    puller = Puller(VersionStore(tmp_path, "run", "node"))
    assert puller.latest() is None
    with pytest.raises(RelayError, match=r"0\.0 is not in .*newest: None"), puller.lease(version("0.0")):
        pass


def test_only_the_kept_versions_remain(roomy):
    for number in range(5):
        roomy.publish(f"0.{number}")
    assert roomy.complete() == ["0.3", "0.4"]


def test_slots_are_rewritten_in_place(machine):
    slots = machine.store.folder / "slots"
    machine.publish("0.0")
    before = {path.name: path.stat().st_ino for path in slots.iterdir()}
    for number in range(1, 6):
        machine.publish(f"0.{number}")
    assert {path.name: path.stat().st_ino for path in slots.iterdir()} == before
    assert len(before) == 2


def test_leased_version_keeps_folder_and_bytes_while_newer_ones_come(roomy):
    roomy.publish("0.0", 7.0)
    with roomy.puller.lease(version("0.0")) as folder:
        for number in range(1, 6):
            assert not roomy.publish(f"0.{number}").skipped
        roomy.puller.verify(version("0.0"))
        assert read(folder) == 7.0
        assert roomy.complete() == ["0.0", "0.4", "0.5"]
    roomy.publish("0.6")
    assert roomy.complete() == ["0.5", "0.6"]


def test_with_every_slot_leased_the_version_is_skipped_and_can_be_offered_again(machine):
    machine.publish("0.0")
    with machine.puller.lease(version("0.0")):
        machine.publish("0.1")
        with machine.puller.lease(version("0.1")):
            report = machine.publish("0.2")
            assert (report.skipped, report.bytes) == (True, 0)
            assert "0.0" in report.reason
            assert machine.puller.latest() == version("0.1")
    assert not machine.publish("0.2").skipped
    assert machine.complete() == ["0.2"]
    machine.puller.verify(version("0.2"))


def test_version_leased_twice_stays_until_the_last_lease_ends(machine):
    machine.publish("0.0")
    with machine.puller.lease(version("0.0")):
        with machine.puller.lease(version("0.0")):
            machine.publish("0.1")
        assert machine.publish("0.2").skipped
    assert not machine.publish("0.2").skipped


def test_death_of_a_reader_frees_its_version(machine):
    machine.publish("0.0")
    reader = start_reader(machine, LEASE_UNTIL_TOLD)
    assert reader.stdout.readline() == "leased\n"
    machine.publish("0.1")
    assert machine.publish("0.2").skipped
    reader.send_signal(signal.SIGKILL)
    reader.communicate(timeout=10)
    assert not machine.publish("0.2").skipped


def test_reader_that_opened_the_file_just_before_its_slot_was_rewritten_gets_no_lease(machine):
    machine.publish("0.0")
    reader = start_reader(machine, PAUSE_BEFORE_LOCK + LEASE_UNTIL_TOLD)
    assert reader.stdout.readline() == "opened\n"
    machine.publish("0.1")
    assert not machine.publish("0.2").skipped
    output, _ = reader.communicate("go on\n", timeout=10)
    assert output == ""
    assert reader.returncode == 1


def test_lease_of_a_removed_version_names_the_newest(machine):
    machine.publish("0.0")
    machine.publish("0.1")
    machine.publish("0.2")
    with (
        pytest.raises(RelayError, match=r"0\.0 is not in .*newest: 0\.2.*lease the newest"),
        machine.puller.lease(version("0.0")),
    ):
        pass


def test_version_that_is_just_being_taken_away_cannot_be_leased(machine):
    machine.publish("0.0")
    weights = machine.store.folder_of(version("0.0")) / "model.safetensors"
    with FileLock.acquire(weights, create=False), pytest.raises(RelayError), machine.puller.lease(version("0.0")):
        pass
    with machine.puller.lease(version("0.0")):
        pass


def test_same_version_again_does_nothing(roomy):
    roomy.publish("0.0", 1.0)
    roomy.publish("0.1", 2.0)
    for text in ("0.0", "0.1"):
        report = roomy.publish(text, 9.0)
        assert (report.skipped, report.bytes) == (False, 0)
        assert "complete already" in report.reason
    with roomy.puller.lease(version("0.1")) as folder:
        assert read(folder) == 2.0


def test_lower_number_or_lineage_is_refused(machine):
    machine.publish("1.4")
    for text in ("1.3", "0.9"):
        with pytest.raises(RelayError, match=rf"{text} is older than 1\.4"):
            machine.publish(text)


def test_newer_lineage_supersedes_the_older_only_when_its_first_version_is_complete(roomy):
    roomy.publish("0.8")
    roomy.publish("0.9")
    with pytest.raises(RelayError):
        roomy.publisher.publish(version("1.4"), [("a", torch.zeros(40, 50))])
    assert roomy.complete() == ["0.8", "0.9"]
    with roomy.puller.lease(version("0.9")):
        roomy.publish("1.4")
        assert roomy.puller.latest() == version("1.4")
        assert roomy.complete() == ["0.9", "1.4"]
    assert roomy.store.prune() == [version("0.9")]
    assert roomy.complete() == ["1.4"]


def test_failed_publish_leaves_the_older_version_and_can_be_repeated(machine):
    machine.publish("0.0", 5.0)

    def tensors():
        yield "a", torch.zeros(40, 50)
        raise FloatingPointError("from the gathering code")

    with pytest.raises(FloatingPointError):
        machine.publisher.publish(version("0.1"), tensors())
    assert machine.complete() == ["0.0"]
    with machine.puller.lease(version("0.0")) as folder:
        assert read(folder) == 5.0
    machine.publish("0.1")
    assert machine.complete() == ["0.1"]


def test_publish_that_does_not_wait_has_taken_the_values_when_it_returns_and_shows_them_later(machine):
    tensors = state(1)
    report = machine.publisher.publish(version("0.1"), tensors.items(), until="copied")
    for tensor in tensors.values():
        tensor.fill_(9)
    machine.publisher.settle()
    assert report.bytes > 0
    with machine.store.lease(version("0.1")) as folder:
        assert read(folder) == 1


def test_publish_that_has_only_begun_reads_the_values_until_its_copy_is_finished(machine):
    tensors, asked, gate = state(1), threading.Event(), threading.Event()

    def slowly():
        asked.set()
        assert gate.wait(30)
        yield from tensors.items()

    machine.publisher.prepare(load_layout(tensors.items()))
    report = machine.publisher.publish(version("0.1"), slowly(), until="begun")
    assert asked.wait(30)
    assert (report.skipped, machine.complete()) == (False, [])
    gate.set()
    assert machine.publisher.finish_copy() > 0
    for tensor in tensors.values():
        tensor.fill_(9)
    assert machine.publisher.finish_copy() == 0
    machine.publisher.settle()
    with machine.store.lease(version("0.1")) as folder:
        assert read(folder) == 1


def test_begun_publish_of_a_wrong_tensor_is_named_when_its_copy_is_to_be_finished_and_dropped(machine):
    machine.publish("0.0")
    machine.publisher.publish(version("0.1"), (state(1) | {"c": torch.zeros(1)}).items(), until="begun")
    with pytest.raises(RelayError, match="'c' is not in the layout"):
        machine.publisher.finish_copy()
    machine.publisher.settle()
    assert machine.complete() == ["0.0"]
    machine.publish("0.2")
    assert machine.complete()[-1] == "0.2"


def test_what_fails_after_the_copy_is_raised_by_the_next_call_and_the_slot_is_free_again(machine):
    machine.publish("0.1")
    shutil.rmtree(machine.store.folder / "versions")
    machine.publisher.publish(version("0.2"), state(2).items(), until="copied")
    with pytest.raises(FileNotFoundError):
        machine.publisher.publish(version("0.3"), state(3).items())
    machine.store.create()
    machine.publish("0.3")
    assert machine.store.versions() == [version("0.3")]


def test_layout_is_fixed_at_the_first_publish(machine):
    machine.publish("0.0")
    with pytest.raises(RelayError, match="'c' is not in the layout"):
        machine.publisher.publish(version("0.1"), (state(1.0) | {"c": torch.zeros(1)}).items())
    with pytest.raises(RelayError, match="fixed at the first publish"):
        machine.publisher.prepare(load_layout([("c", torch.zeros(1))]))


def test_restarted_publisher_goes_on_with_another_layout_and_keeps_the_versions(machine):
    machine.publish("0.0", 4.0)
    machine.restart_publisher()
    machine.publisher.prepare(load_layout([("other", torch.zeros(3))]))
    machine.puller.verify(version("0.0"))
    machine.publisher.publish(version("1.0"), [("other", torch.ones(3))])
    machine.puller.verify(version("1.0"))
    assert machine.complete() == ["1.0"]


def test_restarted_publisher_removes_what_its_predecessor_left_half_done(machine):
    machine.publish("0.0")
    versions = machine.store.folder / "versions"
    (versions / ".partial-0.1").mkdir()
    os.link(machine.store.folder / "slots" / "1.safetensors", versions / ".partial-0.1" / "model.safetensors")
    (versions / ".removed-0.0").mkdir()
    machine.restart_publisher()
    assert os.listdir(versions) == ["0.0"]


def test_second_publisher_is_refused_until_the_first_ends(machine):
    with pytest.raises(RelayError, match="already has a living publisher"):
        Publisher(machine.store, machine.model_files)
    machine.publisher.close()
    Publisher(machine.store, machine.model_files).close()


def test_other_ranks_write_nothing_and_read_no_tensor(tmp_path):
    def tensors():
        raise AssertionError("rank 1 must not gather")
        yield

    store = VersionStore(tmp_path, "run", "node")
    publisher = Publisher(store, tmp_path, rank=1, world_size=2)
    publisher.prepare(load_layout([("a", torch.zeros(1))]))
    report = publisher.publish(version("0.0"), tensors())
    assert (report.skipped, report.bytes) == (False, 0)
    assert "rank 1 of 2" in report.reason
    assert list(tmp_path.iterdir()) == []


def test_version_folder_has_config_and_tokenizer_but_no_foreign_weights(machine):
    files = machine.model_files
    for name in ("tokenizer.json", "tokenizer.model", "merges.txt", "generation_config.json", "chat_template.jinja"):
        (files / name).write_text(name)
    for name in ("model-00001-of-2.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "README.md"):
        (files / name).write_text("not this")
    machine.restart_publisher()
    machine.publish("0.0")
    with machine.puller.lease(version("0.0")) as folder:
        assert sorted(os.listdir(folder)) == [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "manifest.json",
            "merges.txt",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer.model",
        ]
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "x"}


def test_model_folder_without_config_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Publisher(VersionStore(tmp_path, "run", "node"), tmp_path / "model")


def test_root_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(EnvironmentSetupError, match="is not a folder"):
        VersionStore(tmp_path / "missing", "run", "node").create()


def test_slots_that_do_not_fit_are_refused_before_the_first_publish(machine):
    layout = load_layout([("huge", torch.empty(10**14, device="meta"))])
    with pytest.raises(EnvironmentSetupError, match=r"need 800,000,\d{3},\d{3},\d{3} bytes"):
        machine.publisher.prepare(layout)


def test_a_store_that_keeps_nothing_is_refused(tmp_path):
    with pytest.raises(InvariantError):
        VersionStore(tmp_path, "run", "node", keep_versions=0)


def test_verify_names_the_broken_piece(machine):
    machine.publish("0.0")
    with (machine.store.folder_of(version("0.0")) / "model.safetensors").open("r+b") as file:
        file.seek(2500)
        file.write(b"\xff")
    with pytest.raises(RelayError, match=r"0\.0: piece 2 of 9 is broken"):
        machine.puller.verify(version("0.0"))


async def test_wait_newer_returns_the_newest_as_soon_as_it_is_complete(machine):
    machine.publish("0.0")
    assert await machine.puller.wait_newer(None, 1.0) == version("0.0")
    waiting = asyncio.create_task(machine.puller.wait_newer(version("0.0"), 10.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    machine.publish("0.1")
    machine.publish("0.2")
    assert await waiting == version("0.2")


async def test_wait_newer_counts_a_newer_lineage_as_newer_whatever_its_number(machine):
    machine.publish("1.2")
    assert await machine.puller.wait_newer(version("0.7"), 1.0) == version("1.2")


async def test_wait_newer_names_what_it_waited_for(machine):
    machine.publish("0.3")
    with pytest.raises(DeadlineError, match=r"waited 0\.0 s for a weight version newer than 0\.3"):
        await machine.puller.wait_newer(version("0.3"), 0.04)
