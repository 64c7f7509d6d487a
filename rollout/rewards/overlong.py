"""Reward `overlong`: 0 for an answer of fair length, down to -1 for one that is too long.

Soft overlong punishment of DAPO (arXiv 2503.14476), section 3.4, equation 13.
"""

from pydantic import Field, model_validator

from laminar.config.section import Section
from rollout.rewards.base import RewardContext


class Overlong:
    """Counts sampled tokens, of all turns."""

    class Options(Section):
        """Settings of `overlong`."""

        max_tokens: int = Field(ge=1)
        """Longest fair answer and its cache together (the paper's L_max); beyond it the penalty is 1."""
        cache_tokens: int = Field(ge=1)
        """Tokens before `max_tokens` over which the penalty grows (the paper's L_cache)."""

        @model_validator(mode="after")
        def _cache_fits(self) -> "Overlong.Options":
            if self.cache_tokens > self.max_tokens:
                raise ValueError(f"cache_tokens {self.cache_tokens} is above max_tokens {self.max_tokens}; lower it")
            return self

    def __init__(self, options: Options) -> None:
        self._options = options

    async def score(self, context: RewardContext) -> float:
        """Between -1.0 and 0.0."""
        fair = self._options.max_tokens - self._options.cache_tokens
        return -min(1.0, max(0, context.num_completion_tokens - fair) / self._options.cache_tokens)
