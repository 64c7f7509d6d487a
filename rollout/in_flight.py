"""How many groups a worker plays at once: a limit that follows its engine's pressure (`laminar.policies.in_flight`).

It knows neither groups nor engines.
"""

from laminar.policies.in_flight import next_limit
from rollout.engines.wire import EngineLoad


class InFlightLimit:
    """One worker's limit.

    Args:
        ceiling: most groups, ever.
        adapts: whether pressure lowers the limit.

    Attributes:
        groups: most groups now.
    """

    def __init__(self, ceiling: int, *, adapts: bool) -> None:
        self._adapts = adapts
        self._num_retractions = 0
        self.set_ceiling(ceiling)

    def set_ceiling(self, groups: int) -> None:
        """Play at most so many from now on, and as many as that until pressure says otherwise."""
        self._ceiling = self.groups = groups

    def adapt(self, load: EngineLoad | None, num_here: int) -> None:
        """Look at the engine's load while so many groups take room on it; None while it does not answer."""
        if load is None or not self._adapts:
            return
        self.groups = next_limit(
            self.groups,
            ceiling=self._ceiling,
            in_flight=num_here,
            kv_share=load.used_tokens / max(load.capacity_tokens, 1),
            num_waiting=load.waiting,
            num_retracted=max(0, load.num_retractions - self._num_retractions),
        )
        self._num_retractions = load.num_retractions
