"""Reward `relative_length`: right answers are worth more the shorter they are among their siblings.

Length reward of Kimi k1.5 (arXiv 2501.12599), section 2.3.3: with λ = 0.5 - (length - shortest) / (longest - shortest),
a right answer gets λ, a wrong one min(0, λ); all get 0 if all are of one length.
"""

from collections.abc import Sequence

from laminar.config.section import Section
from rollout.rewards.base import RewardContext


class RelativeLength:
    """Compares sampled tokens, of all turns."""

    class Options(Section):
        """Settings of `relative_length`."""

        right_term: str = "exact_match"
        """Name of the term that says whether an answer is right."""
        right_from: float = 1.0
        """Its least value for a right answer."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def score_group(self, contexts: Sequence[RewardContext]) -> list[float]:
        """Between -0.5 and 0.5 each.

        Raises:
            KeyError: there is no such term.
        """
        lengths = [context.num_completion_tokens for context in contexts]
        shortest, spread = min(lengths), max(lengths) - min(lengths)
        if not spread:
            return [0.0] * len(contexts)
        worth = [0.5 - (length - shortest) / spread for length in lengths]
        return [x if self._is_right(context) else min(0.0, x) for context, x in zip(contexts, worth, strict=True)]

    def _is_right(self, context: RewardContext) -> bool:
        return context.terms[self._options.right_term] >= self._options.right_from
