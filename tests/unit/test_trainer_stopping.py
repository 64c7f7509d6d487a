"""The run's limits, each inclusive, over all lives together."""

import pytest

from laminar.config.system import RunConfig
from trainer.progress import Progress
from trainer.stopping import stop_reason, what_is_left


@pytest.mark.parametrize(
    ("limits", "progress", "reason"),
    [
        ({}, {"step": 99}, None),
        ({}, {"step": 100}, "max_steps"),
        ({"max_trained_tokens": 500}, {"trained_tokens": 499.0}, None),
        ({"max_trained_tokens": 500}, {"trained_tokens": 500.0}, "max_trained_tokens"),
        ({"max_train_seconds": 3600.0}, {"step_seconds": 3599.0}, None),
        ({"max_train_seconds": 3600.0}, {"step_seconds": 3601.0}, "max_train_seconds"),
        ({"stop_at_reward": 0.5, "stop_at_reward_steps": 2}, {"recent_rewards": (0.9,)}, None),
        ({"stop_at_reward": 0.5, "stop_at_reward_steps": 2}, {"recent_rewards": (0.25, 0.75)}, "stop_at_reward"),
        ({"stop_at_reward": 0.5, "stop_at_reward_steps": 2}, {"recent_rewards": (0.75, 0.2)}, None),
        ({"stop_at_reward": 0.5, "stop_at_reward_steps": 2}, {"recent_rewards": (0.0, 0.4, 0.6)}, "stop_at_reward"),
        ({"stop_at_reward": -1.0, "stop_at_reward_steps": 1}, {"recent_rewards": (-0.5,)}, "stop_at_reward"),
    ],
)
def test_a_run_ends_when_a_limit_is_reached_and_not_before(limits, progress, reason):
    assert stop_reason(RunConfig(**limits), Progress(**progress)) == reason


def test_what_is_left_is_told_of_every_limit_that_is_set_and_of_no_other():
    progress = Progress(step=40, trained_tokens=700.0, step_seconds=25.0)
    assert what_is_left(RunConfig(max_steps=100), progress, None) == {"run.max_steps": 60.0}
    limits = RunConfig(max_steps=100, max_trained_tokens=1000, max_train_seconds=60)
    assert what_is_left(limits, progress, 0) == {
        "run.max_steps": 60.0, "run.max_trained_tokens": 300.0, "run.max_train_seconds": 35.0, "data.max_epochs": 0.0
    }  # fmt: skip
