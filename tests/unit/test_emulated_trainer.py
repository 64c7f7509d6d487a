"""The emulated trainer: versions differ, and a resume stands where the last life stood."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from laminar.config.root import LaminarConfig
from laminar.config.trainer import EmulatedTrainerConfig
from laminar.errors import ConfigError, EnvironmentSetupError
from laminar.experience.answers import Frontier
from laminar.types import Chain, FinishReason, Purpose, SamplingParameters, Trajectory, WeightVersion, given, sampled
from trainer.emulated import EmulatedSession, step_seconds
from trainer.progress import Progress
from trainer.spool_file import SpooledGroup, SpooledStep

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[4.0]])}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "model").mkdir()
    save_file(WEIGHTS, tmp_path / "model" / "model.safetensors")
    return LaminarConfig.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "data": {"path": "-"},
            "trainer": {"kind": "emulated", "emulated": {"step_seconds": [0.0]}},
        }
    )


def group(step):
    answer = sampled([7, 8, 9], [-0.5, -0.25, -1.0], WeightVersion(0, step - 1))
    return (
        Trajectory(
            f"{step}-000", str(step), "p", 0, 1, Purpose.TRAIN, SamplingParameters(1.0, 8, 0),
            (Chain((given([1]), answer)),),
            FinishReason.STOP, 1.0,
        ),
    )  # fmt: skip


def train(session, step):
    report = session.train([group(step)], step)
    header = SpooledStep(Progress(step=step), Frontier(number=step), "digest", (SpooledGroup(str(step), (0, step, 0)),))
    session.spool.commit(header, [group(step)])
    return report


def weights(session):
    return {name: tensor.numpy() for name, tensor in session.state_tensors()}


def test_a_step_scales_the_weights_by_a_thousandth_and_counts_its_tokens(config, tmp_path):
    session = EmulatedSession(config, tmp_path / "checkpoints")
    assert np.array_equal(weights(session)["a"], [1.0, 2.0])
    report = train(session, 1)
    assert (report.step, report.trained_tokens, report.metrics["train/tokens"]) == (1, 3, 3.0)
    assert weights(session)["a"] == pytest.approx([1.001, 2.002])


def test_a_resume_goes_on_behind_the_checkpoint_and_the_spooled_steps(config, tmp_path):
    first = EmulatedSession(config, tmp_path / "checkpoints")
    for step in (1, 2, 3):
        train(first, step)
        if step == 2:
            first.save(Progress(step=2), Frontier(number=2))
    second = EmulatedSession(config, tmp_path / "checkpoints")
    assert (second.progress.step, second.saved_step) == (2, 2)
    told = []
    second.replay(lambda header, report: told.append((header.step, report.trained_tokens)))
    assert told == [(3, 3)]
    assert (second.progress.step, second.frontier.number) == (3, 3)
    assert weights(second)["b"] == pytest.approx(weights(first)["b"])


def test_a_save_that_finds_the_disk_full_names_the_remedy_and_the_older_one_stands(config, tmp_path, disk_limit):
    session = EmulatedSession(config, tmp_path / "checkpoints")
    session.save(Progress(step=1), Frontier(number=1))
    with disk_limit(10), pytest.raises(EnvironmentSetupError, match=r"step 2 could not be written .* then resume"):
        session.save(Progress(step=2), Frontier(number=2))
    assert EmulatedSession(config, tmp_path / "checkpoints").progress.step == 1


def test_a_model_without_its_one_weights_file_is_refused_with_the_path(config, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors is not there"):
        EmulatedSession(config, tmp_path / "checkpoints")


def test_a_step_takes_its_place_in_the_table_and_its_tokens_at_the_pace():
    paced = EmulatedTrainerConfig(step_seconds=[0.5, 1.0], tokens_per_second=200.0)
    assert [step_seconds(paced, step, 100) for step in (1, 2, 3)] == [1.0, 1.5, 1.0]
    assert step_seconds(EmulatedTrainerConfig(), 1, 100) == 1.0
