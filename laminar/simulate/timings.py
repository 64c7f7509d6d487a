"""How long a real engine's steps take, and how long answers become: for the simulator and for engines that only pretend.

The numbers are the paper's (`paper_timings.json` names figures); what they leave out is stated here:
- figure 4 gives one context length, 4,096 tokens. What a step takes beyond that of one request is reading keys and values
  (32B on four GPUs: 1.07 GB a request, 0.08 ms at 13.4 TB/s, against 0.09 to 0.12 ms in the figure), so it is taken as
  proportional to the context;
- prefill is not given: `prefill_tokens_per_second` is a setting.
Pure; it knows no engine.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar.errors import ConfigError

FloatArray = npt.NDArray[np.float64]

TAIL_DECADES, TAIL_POINTS = 3, 12
"""How far beyond its last quantile a data set's lengths go on, and in how many points."""
LONGEST_TOKENS = 16_384
"""Of the paper's answers: its limit."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Duration of one decode step.

    Attributes:
        batch: (N,) requests in a step, ascending from 1.
        seconds: (N,) that it takes with sequences of `context_tokens`.
    """

    batch: FloatArray
    seconds: FloatArray
    context_tokens: float

    def step_seconds(self, num_requests: float, total_context_tokens: float) -> float:
        """Seconds for one token of each of so many requests (or a mean number), whose contexts sum up to so many tokens.

        Beyond the largest measured batch the last slope goes on.
        """
        if num_requests <= self.batch[-1]:
            seconds = float(np.interp(num_requests, self.batch, self.seconds))
        else:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.batch[-1] - self.batch[-2])
            seconds = float(self.seconds[-1] + slope * (num_requests - self.batch[-1]))
        alone = float(self.seconds[0])
        return alone + (seconds - alone) * total_context_tokens / num_requests / self.context_tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens an answer has.

    Attributes:
        shares: (N,) ascending, from 0 to 1.
        tokens: (N,) that this share of answers does not exceed.
    """

    shares: FloatArray
    tokens: FloatArray

    def quantile(self, share: float) -> int:
        """Length that this share of answers does not exceed; at least 1. Between given points log-lengths are linear."""
        return max(1, round(float(np.exp(np.interp(share, self.shares, np.log(self.tokens))))))

    def quantiles(self, shares: FloatArray) -> FloatArray:
        """(N,) whole lengths, at least 1, for (N,) shares; as `quantile`."""
        return np.maximum(1.0, np.rint(np.exp(np.interp(shares, self.shares, np.log(self.tokens)))))


def load_step_times(name: str) -> StepTimes:
    """Of one of the paper's engines, such as `32B_TP4`.

    Raises:
        ConfigError: if there is none of that name.
    """
    data = _paper()
    row = _row(data["decode_milliseconds"], name, "latency")
    batch = np.array([float(key) for key in row])
    return StepTimes(batch, np.array(list(row.values())) / 1000, float(data["decode_context_tokens"]))


def load_lengths(name: str, scale: float = 1.0) -> Lengths:
    """Of one of the paper's data sets, such as `32B_math`, every length times `scale`.

    The figure ends at the 5 % and the 99.9 % quantile: below, lengths fall to half the one; above, they go on as between the
    last two quantiles, where they grow by the same factor whenever ten times fewer answers are longer (a Pareto tail), up to
    the paper's longest answer.

    Raises:
        ConfigError: if there is none of that name.
    """
    row = _row(_paper()["response_tokens"], name, "lengths")
    tokens = np.array([float(value) for value in row.values()])
    shares = np.array([float(key.removeprefix("p")) / 100 for key in row])
    growth = (tokens[-1] / tokens[-2]) ** (1 / np.log10((1 - shares[-2]) / (1 - shares[-1])))
    decades = np.arange(1, TAIL_POINTS + 1) / TAIL_POINTS * TAIL_DECADES
    return Lengths(
        np.concatenate([[0.0], shares, 1 - (1 - shares[-1]) * 10.0 ** -decades[:-1], [1.0]]),
        np.concatenate([[tokens[0] / 2], tokens, np.minimum(tokens[-1] * growth**decades, LONGEST_TOKENS)]) * scale,
    )


def _row(table: Mapping[str, Any], name: str, what: str) -> Mapping[str, float]:
    if name not in table:
        raise ConfigError(f"{what} is {name!r}, which is not known; choose one of {', '.join(table)}")
    return table[name]


def _paper() -> dict[str, Any]:
    text = resources.files("laminar.simulate").joinpath("paper_timings.json").read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content
