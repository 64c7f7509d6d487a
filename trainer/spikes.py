"""Is an update's loss, KL or gradient norm out of all proportion to those before it? Pure.

The running scale is robust: median and median absolute deviation of the last updates, spikes among them included, so that
one of them neither hides the next nor, if the level has really changed, is one for ever.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laminar.config.trainer import SpikesConfig

GRADIENT = "gradient norm"
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
LEAST = {"loss": 0.01, "KL": 0.01}
"""What is no spike however calm it was before, by figure; of the gradient's norm, what is clipped anyway."""
LEAST_SHARE = 0.1
"""The deviation counts as at least this share of the median's size: figures that hardly move are allowed to."""


@dataclass(frozen=True, slots=True)
class Spike:
    """A figure that stands out.

    Attributes:
        name: of the figure.
        value: it has.
        median: of the last updates.
        limit: it passes.
    """

    name: str
    value: float
    median: float
    limit: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} is above {self.limit:.4g} (median of the last updates {self.median:.4g})"


class SpikeDetector:
    """The last figures of one model's updates; the same on every rank.

    Args:
        config: how much is too much.
        max_grad_norm: to which gradients are clipped.
    """

    def __init__(self, config: SpikesConfig, max_grad_norm: float = 0.0) -> None:
        self._config = config
        self._least = LEAST | {GRADIENT: max_grad_norm}
        self._known: dict[str, deque[float]] = {}

    def limit(self, name: str) -> float:
        """What a figure may be; infinite while too little is known."""
        return self._judge(name)[1]

    def find(self, figures: Mapping[str, float]) -> Spike | None:
        """The first figure above its limit."""
        for name, value in figures.items():
            median, limit = self._judge(name)
            if value > limit:
                return Spike(name, value, median, limit)
        return None

    def add(self, figures: Mapping[str, float]) -> None:
        """Remember an update's figures; those that are not finite are another net's."""
        for name, value in figures.items():
            if math.isfinite(value):
                self._known.setdefault(name, deque(maxlen=self._config.window_updates)).append(value)

    def state(self) -> dict[str, list[float]]:
        """What is known, as JSON values; part of every checkpoint."""
        return {name: list(values) for name, values in self._known.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` said."""
        window = self._config.window_updates
        self._known = {name: deque(values, maxlen=window) for name, values in state.items()}

    def _judge(self, name: str) -> tuple[float, float]:
        """Median and limit."""
        values = self._known.get(name, ())
        if self._config.action == "off" or len(values) < self._config.min_updates:
            return math.nan, math.inf
        median = statistics.median(values)
        deviation = NORMAL * statistics.median(abs(value - median) for value in values)
        limit = median + self._config.factor * max(deviation, LEAST_SHARE * abs(median))
        return median, max(limit, self._least.get(name, 0.0))
