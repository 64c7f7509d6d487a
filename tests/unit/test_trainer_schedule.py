"""The learning rate depends on the step's number only."""

import pytest

from laminar.config.trainer import TrainerConfig
from trainer.schedule import learning_rate


def rates(max_steps=8, **fields):
    config = TrainerConfig(learning_rate=1.0, **fields)
    return [learning_rate(config, step, max_steps) for step in range(1, max_steps + 1)]


def test_constant_rises_over_the_warm_up_and_stays():
    assert rates(warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_linear_decay_starts_after_the_warm_up_and_never_trains_a_step_at_zero():
    assert rates(6, lr_schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])


def test_cosine_is_half_way_down_at_half_time_and_keeps_its_floor():
    values = rates(4, lr_schedule="cosine", min_lr_ratio=0.2)
    assert values[0] == 1
    assert values[2] == pytest.approx(0.6)
    config = TrainerConfig(learning_rate=1.0, lr_schedule="cosine", min_lr_ratio=0.2)
    assert learning_rate(config, 100, 4) == pytest.approx(0.2)
