"""A log-prob probe: fixed tokens and what the trainer's own forward pass makes of them, sent along with each version.

Whoever loads a version scores the same tokens and compares. That finds what no checksum can: weights that arrived whole but
lie in the wrong place, in part, twice, or under another model. One small update moves the log-probs by less than number
types do, so which of two close versions is served the probe cannot tell; the version's name does.

Invariant: the tokens depend on the vocabulary alone, so all versions of a run are probed alike.
Does not know models or engines; imports no torch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from laminar.errors import RelayError

NUM_PROBE_TOKENS = 32
_SEED = 20251202
_WIDE = frozenset({"F32", "F64"})
WIDE_TOLERANCE, NARROW_TOLERANCE = 0.01, 0.3


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens and their log-probs.

    Attributes:
        token_ids: T of them.
        logprobs: T - 1, in nats at temperature 1: of each token but the first, given those before it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or len(self.logprobs) != len(self.token_ids) - 1:
            raise RelayError(f"a probe of {len(self.token_ids)} tokens cannot have {len(self.logprobs)} log-probs")
        if not all(map(math.isfinite, self.logprobs)):
            raise RelayError("a log-prob of the probe is not finite: these weights are broken")

    def difference(self, logprobs: Sequence[float]) -> float:
        """Mean absolute difference in nats to what another model makes of the tokens; infinite if it is not finite."""
        if len(logprobs) != len(self.logprobs):
            return math.inf
        mean = float(np.abs(np.subtract(logprobs, self.logprobs)).mean())
        return mean if math.isfinite(mean) else math.inf


def probe_tokens(vocabulary_size: int) -> tuple[int, ...]:
    """The fixed tokens, drawn evenly from the vocabulary: every part of the model takes part, and nothing is certain."""
    drawn = np.random.Generator(np.random.PCG64(_SEED)).integers(0, vocabulary_size, NUM_PROBE_TOKENS)
    return tuple(int(token) for token in drawn)


def default_tolerance(dtypes: Iterable[str]) -> float:
    """Difference in nats that two right implementations may show: little in float32, more in narrower types.

    Args:
        dtypes: of the weights, as safetensors names them.
    """
    return WIDE_TOLERANCE if _WIDE.issuperset(dtypes) else NARROW_TOLERANCE
