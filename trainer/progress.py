"""Where a run stands: part of every checkpoint and of every spooled step. No torch."""

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Totals up to a step. `lineage` is -1 before the first one opens."""

    lineage: int = -1
    step: int = 0
    trained_tokens: float = 0.0
    step_seconds: float = 0.0
    skipped_steps: int = 0
