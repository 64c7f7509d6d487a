"""Does a measured series grow? A robust slope within the lives of restarted processes, and a rule for what is flat. Pure.

The rule: each life loses its first `settle_seconds`, and counts if at least `MIN_SAMPLES` are left. The slope is the median
over all pairs of samples of one life that are at least a third of that life apart (Theil and Sen), so that spikes and
sawteeth do not count. Growth is the slope times the longest life. A series is flat if its growth is at most 5 % of its
median, or at most an allowance in its own unit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIN_SAMPLES = 8
RELATIVE_ALLOWANCE = 0.05


@dataclass(frozen=True, slots=True)
class Growth:
    """How a series went: median of its values, growth over `seconds`, the longest life that was judged."""

    median: float
    growth: float
    seconds: float
    num_samples: int

    def is_flat(self, allowance: float) -> bool:
        """By the module's rule."""
        return self.growth <= max(allowance, RELATIVE_ALLOWANCE * self.median)


def measure_growth(lives: Mapping[int, Sequence[tuple[float, float]]], settle_seconds: float) -> Growth | None:
    """Growth of a series; None if no life is long enough to judge.

    Args:
        lives: by process id, (seconds, value) in order of time.
        settle_seconds: at the beginning of each life that do not count.
    """
    slopes, values, longest = [], [], 0.0
    for samples in lives.values():
        times, heights = (
            np.array([sample for sample in samples if sample[0] >= samples[0][0] + settle_seconds]).reshape(-1, 2).T
        )
        if len(times) < MIN_SAMPLES:
            continue
        span = float(times[-1] - times[0])
        first, second = np.triu_indices(len(times), 1)
        apart = times[second] - times[first]
        far = apart >= span / 3
        slopes.append((heights[second] - heights[first])[far] / apart[far])
        values.append(heights)
        longest = max(longest, span)
    if not slopes:
        return None
    pooled = np.concatenate(values)
    return Growth(float(np.median(pooled)), float(np.median(np.concatenate(slopes))) * longest, longest, len(pooled))
