"""Reward `exact_match`: 1 if the answer is the reference text, else 0."""

from laminar.config.section import Section
from laminar.types import Prompt
from rollout.rewards.base import RewardContext, missing_reference, reference_answer


class ExactMatch:
    """Compares texts, without surrounding blanks."""

    class Options(Section):
        """Settings of `exact_match`."""

        answer_field: str = "answer"
        """Data column that holds the reference answer."""
        first_line: bool = True
        """Only the text before the first newline counts."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def extract(self, completion: str) -> str:
        """The part of a completion that counts as its answer."""
        text = completion.split("\n", 1)[0] if self._options.first_line else completion
        return text.strip()

    def check_prompt(self, prompt: Prompt) -> str | None:
        """What keeps this prompt from being judged."""
        return missing_reference(prompt, self._options.answer_field)

    async def score(self, context: RewardContext) -> float:
        """1.0 or 0.0."""
        reference = reference_answer(context.prompt, self._options.answer_field).strip()
        return float(self.extract(context.completion) == reference)
