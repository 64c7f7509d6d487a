"""Case D25: a save killed at any point leaves a folder from which the right checkpoint is found, and the next save works."""

import json
import logging
import shutil

import pytest

from laminar.errors import ConfigError
from trainer.checkpoint_folder import (
    begin,
    checkpoint_path,
    complete,
    complete_checkpoints,
    find_latest,
    oldest_step,
    read_manifest,
)


def write(root, step, files=("shard_0", "shard_1")):
    folder = begin(root, step)
    (folder / "model").mkdir()
    for file in files:
        (folder / "model" / file).write_bytes(bytes([step % 256]) * 100)
    return folder


def save(root, step, keep=2):
    write(root, step)
    return complete(root, step, {"optimizer_shares": 1}, keep)


@pytest.mark.parametrize("files", [(), ("shard_0",), ("shard_0", "shard_1")])
def test_a_save_killed_before_it_is_complete_leaves_the_older_checkpoint_and_the_next_save_replaces_it(tmp_path, files):
    older = save(tmp_path, 10, keep=1)
    write(tmp_path, 20, files)
    assert find_latest(tmp_path) == older
    assert complete_checkpoints(tmp_path) == [older]
    assert find_latest(tmp_path) == older
    newer = save(tmp_path, 20, keep=1)
    assert find_latest(tmp_path) == newer
    assert complete_checkpoints(tmp_path) == [newer]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000020"]


def test_killed_before_the_pointer_moves_resumes_from_the_one_pointed_to(tmp_path):
    older = save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "latest").write_text(older.name)
    assert find_latest(tmp_path) == older


def test_a_pointer_to_nothing_is_passed_over(tmp_path):
    older = save(tmp_path, 10)
    (tmp_path / "latest").write_text("step_000099")
    assert find_latest(tmp_path) == older


def test_only_the_newest_are_kept_and_leftovers_never_count(tmp_path):
    for step in (10, 20, 30):
        write(tmp_path, step + 5)
        save(tmp_path, step)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000020", "step_000030"]


def test_fewer_checkpoints_than_are_kept_stay(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=4)
    assert len(complete_checkpoints(tmp_path)) == 3


def test_a_step_trained_again_replaces_its_checkpoint(tmp_path):
    save(tmp_path, 10)
    folder = begin(tmp_path, 10)
    (folder / "other").write_text("again")
    final = complete(tmp_path, 10, {}, keep=1)
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "other"]
    assert complete_checkpoints(tmp_path) == [final]


def test_one_flipped_byte_is_found_named_and_the_fall_back_announced(tmp_path, caplog):
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    shard = newer / "model" / "shard_1"
    data = bytearray(shard.read_bytes())
    data[50] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ConfigError, match="shard_1 is damaged"):
        read_manifest(newer)
    with caplog.at_level(logging.WARNING, logger="laminar"):
        assert find_latest(tmp_path) == older
    assert "shard_1" in caplog.text
    assert "falling back" in caplog.text


def test_a_missing_file_is_named_and_without_another_checkpoint_it_is_an_error(tmp_path):
    final = save(tmp_path, 10)
    (final / "model" / "shard_0").unlink()
    with pytest.raises(ConfigError, match="shard_0 is missing"):
        read_manifest(final)
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged \(.*shard_0 is missing\): restore that file"):
        find_latest(tmp_path)


def test_a_new_run_has_no_checkpoint(tmp_path):
    assert find_latest(tmp_path / "none") is None


def test_another_format_version_is_refused_and_never_passed_over_for_an_older_checkpoint(tmp_path):
    save(tmp_path, 10)
    manifest = save(tmp_path, 20) / "manifest.json"
    facts = json.loads(manifest.read_text())
    del facts["checksum"]  # another format may have another
    manifest.write_text(json.dumps(facts | {"format_version": 3}))
    for read in (lambda: read_manifest(checkpoint_path(tmp_path, 20)), lambda: find_latest(tmp_path)):
        with pytest.raises(ConfigError, match=r"format version 3, .* resume the run with the Laminar that wrote it"):
            read()


@pytest.mark.parametrize("bit", [1, 2, 32])
def test_no_flipped_bit_of_a_manifest_changes_what_is_resumed(bit, tmp_path, caplog):
    """It is found, and the older one taken; or, if it is in white space or names the checksum, it changes nothing."""
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    manifest, facts = newer / "manifest.json", read_manifest(newer)
    data = manifest.read_bytes()
    caplog.set_level(logging.CRITICAL, logger="laminar")
    found = []
    for place in range(len(data)):
        manifest.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        found.append(find_latest(tmp_path))
        assert found[-1] == older or facts.items() <= read_manifest(newer).items()
    assert found.count(older) > 0.8 * len(data)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", '"a"', "3", "{}", '{"format_version": 2}', '{"format_version": 2, "step": 20}',
        '{"format_version": 2, "step": "20", "checksums": {}}', '{"format_version": 2, "step": 20, "checksums": null}',
        '{"format_version": 2, "step": 10, "checksums": {}}', '{"format_version": 2, "step": 20, "checksums": {"": ""}}',
    ],
)  # fmt: skip
def test_a_manifest_of_another_shape_is_named_as_damaged(text, tmp_path):
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    (newer / "manifest.json").write_text(text)
    if text == "{}":  # as of another format, which is never passed over
        with pytest.raises(ConfigError, match="format version None"):
            find_latest(tmp_path)
        return
    with pytest.raises(ConfigError, match=r"checkpoint file .*step_000020.* (is damaged|cannot be read)"):
        read_manifest(newer)
    assert find_latest(tmp_path) == older


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"\0" * 11, b"../x", b"step_000030"])
def test_a_damaged_pointer_means_the_newest(data, tmp_path):
    save(tmp_path, 999_999)
    newest = save(tmp_path, 1_000_000)
    (tmp_path / "latest").write_bytes(data)
    assert find_latest(tmp_path) == newest


def test_a_damaged_checkpoint_takes_no_whole_ones_place(tmp_path):
    """A resume fell back behind step 30 for its damaged file, behind step 20 for its lost one, and saves step 25."""
    oldest, lost, damaged = (save(tmp_path, step, keep=3) for step in (10, 20, 30))
    (lost / "model" / "shard_0").unlink()
    (damaged / "model" / "shard_0").write_bytes(b"")
    assert find_latest(tmp_path) == oldest
    newest = save(tmp_path, 25, keep=2)
    assert complete_checkpoints(tmp_path) == [oldest, lost, newest]
    assert (tmp_path / f"{damaged.name}.superseded" / "manifest.json").exists()
    (newest / "model" / "shard_0").unlink()
    assert find_latest(tmp_path) == oldest
    again = save(tmp_path, 30, keep=1)
    assert complete_checkpoints(tmp_path) == [again]


def test_a_users_copy_is_no_checkpoint_and_stays(tmp_path):
    first = save(tmp_path, 10)
    for name in ("step_000010_best", "step_000010.bak"):
        shutil.copytree(first, tmp_path / name)
    save(tmp_path, 999_999)
    save(tmp_path, 1_000_000)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_999999", "step_1000000"]
    assert oldest_step(tmp_path) == 999_999
    assert {"step_000010_best", "step_000010.bak"} < {path.name for path in tmp_path.iterdir()}
