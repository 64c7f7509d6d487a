"""Where a replica's time goes: one activity at any moment, so that the seconds sum up to wall time. Pure, but for the clock.

Prefill and decode share an engine's steps; what the engine tells of its own seconds splits the time in which it generated.
"""

import enum
from collections.abc import Callable


class Activity(enum.StrEnum):
    """What a replica does."""

    GENERATING = "generating"
    DRAINING = "draining"
    SWAPPING = "swapping"
    RESTARTING = "restarting"
    WAITING = "waiting"
    IDLE = "idle"


class TimeUse:
    """Seconds by activity since it was made.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._since, self._activity = clock(), Activity.RESTARTING

    def enter(self, activity: Activity) -> None:
        """From now on the replica does this."""
        now = self._clock()
        self._seconds[self._activity] += now - self._since
        self._since, self._activity = now, activity

    def seconds(self, prefill_share: float) -> dict[str, float]:
        """Seconds by activity up to now, `generating` split into `prefill` and `decode`.

        Args:
            prefill_share: of the engine's own prefill seconds in all that it tells of.
        """
        self.enter(self._activity)
        seconds = {str(activity): value for activity, value in self._seconds.items()}
        generating = seconds.pop(str(Activity.GENERATING))
        return {"prefill": generating * prefill_share, "decode": generating * (1 - prefill_share), **seconds}
