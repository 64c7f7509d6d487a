"""Reward `regex`: 1 if what a pattern finds in the answer is the reference text, else 0.

Searches are bounded in time inside the matcher, because a thread that backtracks for ever could not be ended from outside.
"""

from typing import Any

import regex  # type: ignore[import-untyped]
from pydantic import Field, field_validator

from laminar.config.section import Section
from laminar.types import Prompt
from rollout.rewards.base import RewardContext, reference_answer


class RegexMatch:
    """Compares the last match in the answer with the reference."""

    class Options(Section):
        """Settings of `regex`."""

        pattern: str
        """Finds the answer in the completion: its first group, or the whole match if it has none. The last match counts."""
        answer_field: str = "answer"
        """Data column that holds the reference answer."""
        answer_pattern: str | None = None
        """Finds the answer in the reference in the same way; unset: all of it."""
        ignore: str = ""
        """Characters left out of both before they are compared, such as `,$`."""
        max_search_seconds: float = Field(5.0, gt=0)
        """A longer search is a verifier failure."""

        @field_validator("pattern", "answer_pattern")
        @classmethod
        def _compiles(cls, pattern: str | None) -> str | None:
            try:
                regex.compile(pattern or "")
            except regex.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            return pattern

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pattern = regex.compile(options.pattern)
        self._answer_pattern = None if options.answer_pattern is None else regex.compile(options.answer_pattern)

    def extract(self, completion: str) -> str | None:
        """The last match in a completion, whole; None if there is none.

        Raises:
            TimeoutError: the search took longer than `max_search_seconds`.
        """
        return self._last_match(self._pattern, completion)

    def check_prompt(self, prompt: Prompt) -> str | None:
        """What keeps this prompt from being judged."""
        try:
            self._reference(prompt)
        except (ValueError, TimeoutError) as error:
            return str(error)
        return None

    def score(self, context: RewardContext) -> float:
        """1.0 or 0.0; an answer without a match is a wrong one. Runs in a thread: a search may take long."""
        found = self.extract(context.completion)
        return float(found is not None and self._normal(found) == self._normal(self._reference(context.prompt)))

    def _reference(self, prompt: Prompt) -> str:
        text = reference_answer(prompt, self._options.answer_field)
        if self._answer_pattern is None:
            return text
        found = self._last_match(self._answer_pattern, text)
        if found is None:
            raise ValueError(
                f"prompt {prompt.prompt_id}: answer_pattern {self._options.answer_pattern!r} finds nothing in {text[:80]!r}"
            )
        return found

    def _last_match(self, pattern: Any, text: str) -> str | None:
        """`concurrent` lets other threads run meanwhile."""
        last: str | None = None
        try:
            for match in pattern.finditer(text, timeout=self._options.max_search_seconds, concurrent=True):
                found = match[1] if pattern.groups else match[0]
                last = last if found is None else found
        except TimeoutError as error:
            raise TimeoutError(
                f"{pattern.pattern!r} searched {len(text)} characters for longer than {self._options.max_search_seconds} s"
            ) from error
        return last

    def _normal(self, text: str) -> str:
        return text.translate({ord(character): None for character in self._options.ignore}).strip()
