"""How the last trajectories of a worker ended: too many failures stop the run, many for one reason raise an alarm.

Pure: no I/O, no clock. It keeps no trajectory, and does not know what is done with its sentences.
"""

import re
from collections import Counter, deque

from laminar.types import Failure

WINDOW = 64
"""Ended trajectories over which shares are taken; a quarter of them must be there before anything is said."""
ALARM_RATIO = 0.5
"""Share of the window that failed for one reason, from which on there is an alarm."""
_NUMBERS = re.compile(r"\d+")
_REASON_CHARACTERS = 120


class FailureWindow:
    """The last outcomes.

    Args:
        max_ratio: share of failures above which the run is to stop.
    """

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._last: deque[Failure | None] = deque(maxlen=WINDOW)
        self._told = ""

    def note(self, failure: Failure | None) -> None:
        """Hear of one ended trajectory; None if it has a reward."""
        self._last.append(failure)

    def excess(self) -> str:
        """Why the run must stop: too many failures, by kind, and the first one's text. Empty if it need not."""
        failed = [failure for failure in self._last if failure is not None]
        if len(self._last) < WINDOW // 4 or len(failed) <= self._max_ratio * len(self._last):
            return ""
        kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(failure.kind for failure in failed).most_common())
        return (
            f"{len(failed)} of the last {len(self._last)} trajectories failed ({kinds}), more than "
            f"rollout.max_failure_ratio = {self._max_ratio:g} allows; the first: {failed[0].kind}: {failed[0].text}"
        )

    def alarm(self) -> str:
        """News that a large share failed for one reason; said once, until that is over. Empty if there are none."""
        reasons = Counter(_reason(failure) for failure in self._last if failure is not None)
        reason, count = reasons.most_common(1)[0] if reasons else ("", 0)
        if len(self._last) < WINDOW // 4 or count < ALARM_RATIO * len(self._last):
            self._told = ""
            return ""
        if reason == self._told:
            return ""
        self._told = reason
        return f"{count} of the last {len(self._last)} trajectories failed for one reason: {reason}"


def _reason(failure: Failure) -> str:
    """Kind and text without its numbers, which differ from case to case."""
    return f"{failure.kind}: {_NUMBERS.sub('#', failure.text)[:_REASON_CHARACTERS]}"
