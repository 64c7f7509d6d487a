"""The run folder: made once, its state replaced whole."""

import stat

import pytest

from laminar.errors import ConfigError
from laminar.run_folder import RunFolder, RunState


def test_two_runs_of_one_name_never_share_a_folder(tmp_path):
    assert RunFolder.create(tmp_path, "a").path != RunFolder.create(tmp_path, "a").path


def test_state_round_trips_and_is_readable_by_its_owner_only(tmp_path):
    folder = RunFolder.create(tmp_path, "a")
    folder.write_state(RunState("id", "token", 7, "running", redis_url="redis://:secret@localhost"))
    assert folder.update_state(status="finished") == folder.read_state()
    assert folder.read_state().status == "finished"
    assert stat.S_IMODE((folder.path / "state.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content", [b"", b'{"run_id": "a", "tok', b"\0" * 300, b"\xff\xfe", b"[]", b'{"run_id": "a"}', b'{"unheard_of": 1}']
)
def test_a_state_that_is_torn_or_of_another_version_says_what_is_still_there(tmp_path, content):
    folder = RunFolder.create(tmp_path, "a")
    (folder.path / "state.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"state\.json cannot be read .* `laminar export .*a-.* DIR`"):
        folder.read_state()


def test_settings_are_replaced_whole_and_are_readable_by_their_owner_only(tmp_path):
    folder = RunFolder.create(tmp_path, "a")
    folder.write_config("a = 1\n")
    with folder.config.open() as reader:  # who has begun to read goes on with what was there
        folder.write_config("b = 2\n")
        assert reader.read() == "a = 1\n"
    assert folder.config.read_text() == "b = 2\n"
    assert stat.S_IMODE(folder.config.stat().st_mode) == 0o600


def test_a_folder_that_is_no_run_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        RunFolder.open(tmp_path)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another"):
        RunFolder.create(tmp_path / "file", "a")
