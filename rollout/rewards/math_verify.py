"""Reward `math_verify`: 1 if the answer is mathematically the reference, judged by the package of that name.

Runs in a pool of processes that are killed when they take too long, since an answer such as 9^9^9^9 never ends.
"""

import functools
import logging

from pydantic import Field

from laminar.config.section import Section
from laminar.types import Prompt
from rollout.rewards.base import RewardContext, reference_answer
from rollout.rewards.pool import ProcessPool


class MathVerify:
    """Compares mathematical expressions; LaTeX and plain text."""

    class Options(Section):
        """Settings of `math_verify`."""

        answer_field: str = "answer"
        """Data column that holds the reference answer."""
        num_processes: int = Field(2, ge=1)
        """Answers that one worker judges at once."""
        max_seconds: float = Field(5.0, gt=0)
        """A longer check is a verifier failure."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pool = ProcessPool(
            "rollout.rewards.math_verify:judge",
            size=options.num_processes,
            seconds=options.max_seconds,
            warm_up=["1/2", r"\boxed{\frac{1}{2}}"],
        )
        self.max_running = options.num_processes

    @property
    def pool(self) -> ProcessPool:
        """The processes."""
        return self._pool

    def check_prompt(self, prompt: Prompt) -> str | None:
        """What keeps this prompt from being judged."""
        try:
            reference = reference_answer(prompt, self._options.answer_field)
        except ValueError as error:
            return str(error)
        return None if reference.strip() else f"prompt {prompt.prompt_id}: {self._options.answer_field!r} is empty"

    def score(self, context: RewardContext) -> float:
        """1.0 or 0.0; an answer in which no mathematics is found is a wrong one."""
        return float(self._pool.call(reference_answer(context.prompt, self._options.answer_field), context.completion))


def judge(reference: str, completion: str) -> float:
    """Runs in a pool's process: 1.0 if what the package takes for the answer in `completion` equals `reference`.

    That is what is boxed, or else the last expression; several boxes close to each other are one list. Floats are equal if
    they are to 6 places.

    Raises:
        ValueError: the reference holds no expression.
    """
    from math_verify import verify

    gold = _gold(reference)
    if not gold:
        raise ValueError(f"no mathematical expression is found in the reference {reference[:80]!r}")
    return float(verify(list(gold), _parse(completion), timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _gold(reference: str) -> tuple[object, ...]:
    return tuple(_parse(reference) or _parse(f"${reference}$"))


def _parse(text: str) -> list[object]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that it has no deadline of its own
    return list(parse(text, parsing_timeout=None))
