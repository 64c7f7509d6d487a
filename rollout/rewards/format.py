"""Reward `format`: 1 if the whole answer looks as a pattern says, else 0."""

import regex  # type: ignore[import-untyped]
from pydantic import Field, field_validator

from laminar.config.section import Section
from rollout.rewards.base import RewardContext


class Format:
    """Matches whole answers; a dot matches newlines too."""

    class Options(Section):
        """Settings of `format`."""

        pattern: str
        """What an answer, without surrounding blanks, must match from beginning to end."""
        every_turn: bool = False
        """All turns must match, not only the last one."""
        max_search_seconds: float = Field(5.0, gt=0)
        """A longer search is a verifier failure."""

        @field_validator("pattern")
        @classmethod
        def _compiles(cls, pattern: str) -> str:
            try:
                regex.compile(pattern, regex.DOTALL)
            except regex.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            return pattern

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pattern = regex.compile(options.pattern, regex.DOTALL)

    def score(self, context: RewardContext) -> float:
        """1.0 or 0.0. Runs in a thread: a search may take long."""
        texts = (context.turns or (context.completion,)) if self._options.every_turn else (context.completion,)
        return float(all(self._matches(text.strip()) for text in texts))

    def _matches(self, text: str) -> bool:
        seconds = self._options.max_search_seconds
        return self._pattern.fullmatch(text, timeout=seconds, concurrent=True) is not None
