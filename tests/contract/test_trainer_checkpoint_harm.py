"""Saves that are killed, or find the disk full: what was saved before stands, and the next save works (case D25)."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.errors import EnvironmentSetupError
from trainer import checkpoint
from trainer.checkpoint_folder import begin, complete, complete_checkpoints, find_latest, read_manifest
from trainer.engine import TrainerEngine

spec = importlib.util.spec_from_file_location("step_oracle", Path(__file__).with_name("step_oracle.py"))
oracle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)

pytestmark = pytest.mark.slow

TOUCHING = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
"""What Python tells its audit hooks of before it does it."""


def save(root, step, content):
    folder = begin(root, step)
    (folder / "model").mkdir()
    for name in ("shard_0", "shard_1"):
        (folder / "model" / name).write_bytes(content * 100)
    complete(root, step, {}, keep=2)


def save_and_die(root, step, content, steps_before_death):
    """In a child: save, and be killed before one of the steps that touch the folder. Returns whether it was killed."""
    child = os.fork()
    if child == 0:
        left = [steps_before_death]

        def count(event, arguments):
            if event in TOUCHING and str(arguments[0]).startswith(str(root)):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save(root, step, content)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("again", [False, True], ids=["new", "over an older one of the same step"])
def test_a_save_killed_before_any_of_its_steps_harms_nothing(again, tmp_path):
    seen, number, was_killed = set(), 0, True
    while was_killed:
        root = tmp_path / str(number)
        save(root, 10, b"a")
        if again:
            save(root, 20, b"b")
            (root / "latest").write_text("step_000010")  # as if killed before the pointer moved
        was_killed = save_and_die(root, 20, b"c", number)
        found = find_latest(root)
        assert found is not None
        assert read_manifest(found)["step"] in (10, 20)
        read_manifest(root / "step_000010")  # the older one is never touched before the newer is whole
        seen.add(found.name)
        save(root, 20, b"d")
        assert find_latest(root).name == "step_000020"
        assert (root / "step_000020" / "model" / "shard_1").read_bytes() == b"d" * 100
        assert [path.name for path in complete_checkpoints(root)] == ["step_000010", "step_000020"]
        assert not list(root.glob("*.tmp"))
        shutil.rmtree(root)
        number += 1
    assert seen == {"step_000010", "step_000020"}
    assert number > 15  # it was killed at that many different moments


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, to be grown by `resize(kilobytes)`."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)

    if mount("size=340k").returncode:
        pytest.skip("this user may not mount a file system")
    yield folder, lambda kilobytes: mount(f"remount,size={kilobytes}k")
    subprocess.run(["umount", folder], check=True)


@pytest.mark.heavy
def test_a_full_disk_is_told_with_the_remedy_and_the_older_checkpoint_loads(small_disk, ranks, tmp_path):
    root, resize = small_disk
    config = oracle.make_config(oracle.save_tiny_model(tmp_path / "model"))
    engine, _ = oracle.train(config, ranks, 1)
    older = checkpoint.save(root, 1, engine, {"of": 1}, keep=1)
    with pytest.raises(EnvironmentSetupError, match=r"rank 0 could not write .*No space left on device.*make room"):
        checkpoint.save(root, 2, engine, {"of": 2}, keep=1)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_000001"]
    assert checkpoint.agree_on_latest(root, ranks) == older
    assert checkpoint.load(older, TrainerEngine(config, ranks)) == (1, {"of": 1})
    resize(2000)
    newer = checkpoint.save(root, 2, engine, {"of": 2}, keep=1)
    assert checkpoint.load(newer, TrainerEngine(config, ranks)) == (2, {"of": 2})
