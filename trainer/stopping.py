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


def _reaches(value: float, limit: float | None) -> bool:
    return limit is not None and value >= limit
