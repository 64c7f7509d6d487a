"""Episodes as they are drawn: who played what, when, phase by phase; of the groups that are kept for people, few at a time.

Invariants: bounded between two reports; what comes faster is left out, for drawing only.
"""

from collections import deque
from dataclasses import replace
from typing import Any

from laminar.types import Trajectory
from rollout.trajectory_log import is_sampled

MAX_WAITING = 32


class EpisodeTrace:
    """One worker's last episodes.

    Args:
        rate: share of groups that are drawn, 0 to 1; the same ones whose records are kept.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING)

    def add(self, trajectory: Trajectory) -> Trajectory:
        """Note an episode; returns its trajectory without what is only drawn."""
        timings = trajectory.timings
        if timings.phases and is_sampled(trajectory.group_id, self._rate):
            newest = trajectory.newest
            self._waiting.append(
                {
                    "id": trajectory.trajectory_id,
                    "start": timings.started_at,
                    "seconds": timings.total_seconds,
                    "phases": [list(phase) for phase in timings.phases],
                    "tokens": trajectory.num_sampled_tokens,
                    "turns": len(trajectory.turns),
                    "version": "" if newest is None else str(newest),
                    "outcome": "failed" if trajectory.reward is None else f"reward {trajectory.reward:g}",
                }
            )
        return replace(trajectory, timings=replace(timings, phases=()))

    def take(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken
