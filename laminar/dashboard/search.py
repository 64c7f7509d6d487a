"""Finding trajectories among the kept ones (pure)."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from laminar.trajectories import Summary


class Search(BaseModel):
    """What is looked for; a limit that is unset lets everything through."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field("", max_length=200)
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    min_staleness: int | None = None
    outcome: Literal["any", "trained", "untrained", "failed"] = "any"
    order: Literal["newest", "reward_low", "reward_high", "longest", "shortest", "stalest"] = "newest"
    limit: int = Field(100, ge=1, le=1000)


_ORDERS: dict[str, tuple[Callable[[Summary], Any], bool]] = {
    "newest": (lambda s: s.time, True),
    "reward_low": (lambda s: (s.reward is None, s.reward or 0.0), False),
    "reward_high": (lambda s: (s.reward is not None, s.reward or 0.0), True),
    "longest": (lambda s: s.num_sampled_tokens, True),
    "shortest": (lambda s: s.num_sampled_tokens, False),
    "stalest": (lambda s: -1 if s.staleness is None else s.staleness, True),
}


def search(summaries: Sequence[Summary], wanted: Search) -> list[Summary]:
    """Those that match, in the order asked for."""
    key, is_descending = _ORDERS[wanted.order]
    return sorted((s for s in summaries if matches(s, wanted)), key=key, reverse=is_descending)


def matches(summary: Summary, wanted: Search) -> bool:
    """Whether a trajectory is one of those looked for; one without a reward or staleness lies within no limit of it."""
    text = wanted.text.lower()
    fields = (summary.trajectory_id, summary.prompt_id, summary.worker, summary.failure, summary.finish_reason, summary.text)
    if text and not any(text in field.lower() for field in fields):
        return False
    outcomes = {"any": True, "trained": summary.step is not None, "failed": bool(summary.failure)}
    outcomes["untrained"] = summary.step is None and not summary.failure
    return (
        outcomes[wanted.outcome]
        and _within(summary.reward, wanted.min_reward, wanted.max_reward)
        and _within(summary.num_sampled_tokens, wanted.min_tokens, wanted.max_tokens)
        and _within(summary.staleness, wanted.min_staleness, None)
    )


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)
