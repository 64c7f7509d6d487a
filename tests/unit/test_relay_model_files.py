import os
import resource
from contextlib import contextmanager

import pytest

from laminar.errors import ConfigError, RelayError
from relay.manifest import checksum
from relay.model_files import describe_files, stage_model_files, unpack_files


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("a" * 10_000)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


@pytest.fixture
def staged(tmp_path):
    folder = tmp_path / "staged"
    folder.mkdir()
    return folder


@contextmanager
def files_of_at_most(num_bytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_config_and_tokenizer_are_staged_and_no_weights(model, staged):
    stage_model_files(model, staged)
    assert {path.name: path.read_text() for path in staged.iterdir()} == {
        "config.json": "{}",
        "tokenizer.json": "a" * 10_000,
    }


def test_a_folder_without_config_is_refused_and_replaces_nothing(model, staged):
    stage_model_files(model, staged)
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json: set model\.path"):
        stage_model_files(model, staged)
    assert (staged / "config.json").read_text() == "{}"


def test_a_copy_that_stops_half_way_leaves_the_old_files_whole(model, staged):
    stage_model_files(model, staged)
    before = describe_files(staged)
    (model / "config.json").write_text('{"new": 1}')
    (model / "tokenizer.json").write_text("b" * 10_000)
    with files_of_at_most(5_000), pytest.raises(OSError, match="too large"):
        stage_model_files(model, staged)
    assert describe_files(staged) == before
    stage_model_files(model, staged)
    assert sorted(path.name for path in staged.iterdir()) == ["config.json", "tokenizer.json"]
    assert (staged / "tokenizer.json").read_text() == "b" * 10_000


def test_a_file_that_stays_the_same_is_left_alone_and_one_that_goes_is_removed(model, staged):
    (model / "merges.txt").write_text("x")
    stage_model_files(model, staged)
    before = {name: os.stat(staged / name).st_ino for name in ("config.json", "tokenizer.json")}
    (model / "merges.txt").unlink()
    (model / "config.json").write_text("[]")
    stage_model_files(model, staged)
    after = {path.name: path.stat().st_ino for path in staged.iterdir()}
    assert after["tokenizer.json"] == before["tokenizer.json"]
    assert after["config.json"] != before["config.json"]
    assert sorted(after) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("name", ["../evil", ".hidden", "a/b"])
def test_a_model_file_whose_name_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(RelayError, match="no plain file name"):
        unpack_files(tmp_path, [(name, 3)], b"abc", {name: checksum(b"abc")})
    assert list(tmp_path.iterdir()) == []


def test_model_files_that_are_not_what_was_offered_replace_nothing(tmp_path):
    (tmp_path / "config.json").write_text("old")
    for sizes, body in (([("config.json", 3)], b"abX"), ([("config.json", 2)], b"abc"), ([], b"")):
        with pytest.raises(RelayError, match="came broken"):
            unpack_files(tmp_path, sizes, body, {"config.json": checksum(b"abc")})
    assert (tmp_path / "config.json").read_text() == "old"
