"""Where a run stands: part of every checkpoint and of every spooled step. No torch."""

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Totals up to a step. `lineage` is -1 before the first one opens.

    Attributes:
        lineage: the newest one.
        step: the last one.
        trained_tokens: so far.
        step_seconds: sum over the steps.
        skipped_steps: skipped for safety so far.
        skipped_in_a_row: of these, those at the end.
        recent_rewards: mean reward of each of the last steps, oldest first, as many as `run.stop_at_reward` looks at.
    """

    lineage: int = -1
    step: int = 0
    trained_tokens: float = 0.0
    step_seconds: float = 0.0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    recent_rewards: tuple[float, ...] = ()
