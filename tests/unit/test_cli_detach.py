"""`laminar run --detach`: a run that ends at once is told of with its own exit code and last words."""

import pytest
from typer.testing import CliRunner

from laminar.cli.detach import start_detached
from laminar.cli.main import app
from laminar.errors import LaminarError
from laminar.run_folder import RunFolder


@pytest.mark.slow
def test_a_detached_command_that_ends_at_once_is_told_of_with_its_exit_code_and_last_words(tmp_path):
    folder = RunFolder.create(tmp_path, "a")
    with pytest.raises(LaminarError, match=r"ended at once \(exit code 2\): .*is not a run folder.*supervisor.log") as error:
        start_detached(folder, ["status", str(tmp_path / "nowhere")])
    assert error.value.exit_code == 2


def test_a_wrong_config_is_refused_before_anything_is_detached(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text('[model]\npath = "m"\n[data]\npath = "d"\n[trainer]\nlearning_rat = 1\n')
    result = CliRunner().invoke(app, ["run", "--detach", str(config), f"run.directory={tmp_path / 'runs'}"])
    assert "learning_rat" in str(result.exception)
    assert not (tmp_path / "runs").exists()
