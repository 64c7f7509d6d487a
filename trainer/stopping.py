"""When a run has trained enough, and when it goes on in vain. Pure."""

from laminar.config.system import RunConfig
from trainer.progress import Progress


def stop_reason(config: RunConfig, progress: Progress) -> str | None:
    """Which of the run's limits has been reached; None: train on.

    Args:
        config: the limits.
        progress: after the last step; it outlasts a resume, so the limits hold for all lives together.

    Returns:
        The name of the setting whose limit it is.
    """
    rewards = progress.recent_rewards[-config.stop_at_reward_steps :]
    has_all = len(rewards) == config.stop_at_reward_steps
    reached = {
        "max_steps": progress.step >= config.max_steps,
        "max_trained_tokens": _reaches(progress.trained_tokens, config.max_trained_tokens),
        "max_train_seconds": _reaches(progress.step_seconds, config.max_train_seconds),
        "stop_at_reward": has_all and _reaches(sum(rewards) / len(rewards), config.stop_at_reward),
    }
    return next((name for name, is_reached in reached.items() if is_reached), None)


def what_is_left(config: RunConfig, progress: Progress, groups_left: int | None) -> dict[str, float]:
    """By limit, how much of it is left: of all that can be foreseen to end the run.

    Args:
        config: the limits.
        progress: after the last step.
        groups_left: of the data; None if it has no end.

    Returns:
        Steps, tokens, seconds and groups, by the setting that limits them.
    """
    left = {
        "run.max_steps": config.max_steps - progress.step,
        "run.max_trained_tokens": config.max_trained_tokens and config.max_trained_tokens - progress.trained_tokens,
        "run.max_train_seconds": config.max_train_seconds and config.max_train_seconds - progress.step_seconds,
        "data.max_epochs": groups_left,
    }
    return {name: float(amount) for name, amount in left.items() if amount is not None}


def _reaches(value: float, limit: float | None) -> bool:
    return limit is not None and value >= limit
