"""The learning rate as a pure function of the step, so a resumed run needs no scheduler state."""

import math

from laminar.config.trainer import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, max_steps: int) -> float:
    """Learning rate of all optimizer updates of one step.

    It rises linearly to the peak, which step `warmup_steps` reaches; the step after it starts the decay, which would reach
    `min_lr_ratio` x peak one step after the last, so that no step is trained with a rate of 0.

    Args:
        config: the trainer's settings.
        step: number of the step, from 1.
        max_steps: steps of the whole run.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps - 1) / max(1, max_steps - config.warmup_steps))
    left = 1 - progress if config.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
