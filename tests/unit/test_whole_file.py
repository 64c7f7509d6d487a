"""A file that is replaced in one rename."""

import os

import pytest

from laminar.whole_file import replace_file


def test_text_and_bytes_take_the_place_of_what_was_there_and_leave_nothing_beside(tmp_path):
    path = tmp_path / "state.json"
    for content, read in (("old ü", "old ü".encode()), (b"new", b"new")):
        replace_file(path, content)
        assert path.read_bytes() == read
    assert os.listdir(tmp_path) == ["state.json"]


def test_what_shall_outlive_a_loss_of_power_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(os.fstat(descriptor).st_size))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("renamed"), rename(*paths)))
    replace_file(tmp_path / "state.json", "12345", synced=True)
    assert order == [5, "renamed"]


def test_a_file_for_its_owner_only_is_never_to_be_read_by_others(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("open to all")
    replace_file(path, "a password", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_was_there_stands_if_the_new_content_cannot_be_written(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")
    (tmp_path / "state.tmp").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(path, "new")
    assert path.read_text() == "old"
