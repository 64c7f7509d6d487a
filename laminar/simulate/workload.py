"""What is to be generated and trained: lengths, turns, environments, batches. Frozen; drawn from by the simulation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar.errors import ConfigError
from laminar.simulate.timings import FloatArray, Lengths


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution by some of its quantiles, linear between them.

    Attributes:
        shares: (N,) ascending from 0 to 1.
        values: (N,) that this share of draws does not exceed.
    """

    shares: FloatArray
    values: FloatArray

    def draw(self, shares: FloatArray) -> FloatArray:
        """(N,) values for (N,) shares."""
        return np.interp(shares, self.shares, self.values)

    @property
    def mean(self) -> float:
        """Of all draws."""
        return float(((self.values[1:] + self.values[:-1]) / 2 * np.diff(self.shares)).sum())


@dataclass(frozen=True, slots=True)
class Workload:
    """The task.

    Attributes:
        lengths: sampled tokens of a trajectory, all its turns together.
        prompt_tokens: of every prompt.
        max_new_tokens: longest answer; drawn lengths are cut here.
        group_size: siblings of one prompt.
        num_greedy: played with them for their baseline, and not trained.
        prompts_per_step: groups of a batch.
        num_turns: sampled turns of a trajectory, of equal length.
        turn_seconds: what the environment takes between two turns; None: nothing.
        observation_tokens: what the environment adds to the context between two turns.
    """

    lengths: Lengths
    prompt_tokens: int
    max_new_tokens: int
    group_size: int
    prompts_per_step: int
    num_turns: int = 1
    turn_seconds: Quantiles | None = None
    observation_tokens: int = 0
    num_greedy: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "group_size", "prompts_per_step", "num_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    @property
    def given_tokens(self) -> int:
        """Prompt and observations of one trajectory."""
        return self.prompt_tokens + (self.num_turns - 1) * self.observation_tokens

    @property
    def members_per_group(self) -> int:
        """Trajectories that are played for one prompt."""
        return self.group_size + self.num_greedy

    @property
    def mean_away_seconds(self) -> float:
        """What a trajectory spends in its environment, on average."""
        return (self.num_turns - 1) * self.turn_seconds.mean if self.turn_seconds else 0.0

    @property
    def mean_sampled_tokens(self) -> float:
        """Mean sampled tokens of a trajectory."""
        shares = (np.arange(4000) + 0.5) / 4000
        return float(np.minimum(self.lengths.quantiles(shares), self.max_new_tokens).mean())


class Draws:
    """Lengths and environment times, drawn in blocks from one seeded stream for each.

    Args:
        workload: whose.
        seed: of the streams.
    """

    BLOCK = 4096

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._lengths_random = np.random.default_rng([seed, 0])
        self._seconds_random = np.random.default_rng([seed, 1])
        self._lengths: list[float] = []
        self._seconds: list[float] = []

    def length(self) -> float:
        """Sampled tokens of one trajectory."""
        if not self._lengths:
            drawn = self._workload.lengths.quantiles(self._lengths_random.random(self.BLOCK))
            self._lengths = np.minimum(drawn, self._workload.max_new_tokens).tolist()
        return self._lengths.pop()

    def turn_seconds(self) -> float:
        """What the environment takes once."""
        if self._workload.turn_seconds is None:
            return 0.0
        if not self._seconds:
            self._seconds = self._workload.turn_seconds.draw(self._seconds_random.random(self.BLOCK)).tolist()
        return self._seconds.pop()


def observed_lengths(tokens: Sequence[float]) -> Lengths:
    """The lengths that were seen, as a distribution.

    Raises:
        ConfigError: if there are none.
    """
    shares, values = _observed(tokens, "trajectory")
    return Lengths(shares, np.maximum(values, 1.0))


def observed_quantiles(values: Sequence[float]) -> Quantiles:
    """What was seen, as a distribution.

    Raises:
        ConfigError: if there is nothing.
    """
    return Quantiles(*_observed(values, "time"))


def _observed(values: Sequence[float], what: str) -> tuple[FloatArray, FloatArray]:
    if not values:
        raise ConfigError(f"no {what} was recorded; record some (`metrics.trajectory_rate`), or give quantiles")
    ordered = np.sort(np.asarray(values, np.float64))
    if len(ordered) == 1:
        ordered = np.repeat(ordered, 2)
    return np.linspace(0.0, 1.0, len(ordered)), ordered
