"""`laminar eval` before an engine starts: which folder and config are meant, and a relay's version is held meanwhile."""

import os

import pytest

from laminar.cli.evaluate import _find
from laminar.errors import ConfigError
from laminar.types import WeightVersion
from relay.locks import try_lock
from rollout.offline_evaluation import OneFolder
from trainer.checkpoint_folder import begin, complete

V = WeightVersion(0, 7)


@pytest.fixture
def run_folder(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text("")
    for step in (2, 4):
        (begin(run / "checkpoints", step) / "model").mkdir()
        complete(run / "checkpoints", step, {}, 9)
    return run


def test_a_run_means_its_newest_checkpoint_a_step_that_one_and_0_the_model_it_began_with(run_folder):
    checkpoints, config = run_folder / "checkpoints", run_folder / "config.toml"
    assert _find(run_folder, None, None) == (checkpoints / "step_000004" / "model", 4, config.resolve())
    assert _find(run_folder, 2, None) == (checkpoints / "step_000002" / "model", 2, config.resolve())
    assert _find(run_folder, 0, None) == (None, 0, config)


def test_a_checkpoint_brings_its_runs_config_and_another_may_be_named(run_folder, tmp_path):
    checkpoint = run_folder / "checkpoints" / "step_000002"
    assert _find(checkpoint, None, None)[1:] == (2, (run_folder / "config.toml").resolve())
    assert _find(checkpoint, None, tmp_path / "other.toml")[2] == tmp_path / "other.toml"


def test_any_other_folder_needs_a_config(tmp_path):
    with pytest.raises(ConfigError, match="say with --config"):
        _find(tmp_path, None, None)
    assert _find(tmp_path, None, tmp_path / "x.toml") == (tmp_path, 0, tmp_path / "x.toml")
    with pytest.raises(ConfigError, match=r"--step 7: .* is no run, so it has no steps"):
        _find(tmp_path, 7, tmp_path / "x.toml")


def test_a_version_is_held_while_it_is_measured_and_let_go_after(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    writer = os.open(weights, os.O_RDWR)
    with OneFolder(tmp_path, V).lease(V) as folder:
        assert folder == tmp_path
        assert not try_lock(writer, exclusive=True)
    assert try_lock(writer, exclusive=True)
    with pytest.raises(ConfigError, match="is being rewritten"), OneFolder(tmp_path, V).lease(V):
        raise AssertionError("it must not be read")
    os.close(writer)


def test_a_folder_without_its_weights_in_one_file_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="as `laminar export` writes it"), OneFolder(tmp_path, V).lease(V):
        raise AssertionError("there is nothing to read")
