"""What a reward is: one finite number for one answer.

A reward is one of
- a class with `score(context) -> float`; `async def` is awaited, a plain `def` runs in a thread under the term's timeout;
- a class with `async score_batch(contexts) -> Sequence[float]`, one number for each context, in their order;
- a class with `async score_group(contexts) -> Sequence[float]`, called once with all siblings of a group that have a reward,
  when the last has ended; it may look at the terms that they have by then;
- a function `reward(prompt, completion) -> float`, plain or `async`.
A class may have a nested `Options(Section)` (then it is built with one) and `check_prompt(prompt) -> str | None`, which says
at start what is wrong with a prompt; with `score`, also `extra_seconds(context) -> float`, which the call may take beyond
the term's timeout, for work that has limits of its own. Raising, hanging, or returning anything but one finite number is a
failure, never 0.
This module does not know how terms are combined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from laminar.types import FinishReason, Prompt


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward may look at.

    Attributes:
        trajectory_id: whose answer it is.
        prompt: the task, with the data row's other columns in `fields`.
        completion: text of the last sampled turn.
        turns: texts of all sampled turns, oldest first.
        num_prompt_tokens: tokens before the first sampled one.
        num_completion_tokens: tokens that the policy drew.
        finish_reason: why the last turn ended.
        terms: for `score_group`: what the answer has been given so far, by name, unweighted.
    """

    trajectory_id: str
    prompt: Prompt
    completion: str
    turns: tuple[str, ...] = ()
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    finish_reason: FinishReason = FinishReason.STOP
    terms: Mapping[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Judges one answer."""

    async def score(self, context: RewardContext, /) -> float:
        """One finite number."""
        ...


class BatchReward(Protocol):
    """Judges several answers in one call. An episode that ends alone comes as a batch of one."""

    async def score_batch(self, contexts: Sequence[RewardContext], /) -> Sequence[float]:
        """One finite number for each context, in their order."""
        ...


class GroupReward(Protocol):
    """Judges all siblings of a group in one call."""

    async def score_group(self, contexts: Sequence[RewardContext], /) -> Sequence[float]:
        """One finite number for each context, in their order (by member). A failure is every sibling's."""
        ...


def missing_reference(prompt: Prompt, answer_field: str) -> str | None:
    """Why the prompt has no right answer; None if it has one."""
    try:
        reference_answer(prompt, answer_field)
    except ValueError as error:
        return str(error)
    return None


def reference_answer(prompt: Prompt, answer_field: str) -> str:
    """The prompt's right answer as text; a float in full, without an exponent.

    Raises:
        ValueError: the field is missing, or neither text nor a number.
    """
    if answer_field not in prompt.fields:
        raise ValueError(
            f"prompt {prompt.prompt_id} has no column {answer_field!r}, only {sorted(prompt.fields)}; set answer_field"
        )
    answer = prompt.fields[answer_field]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"prompt {prompt.prompt_id}: {answer_field!r} is {answer!r:.80}; it must be text or a number")
    # not 1e-05, which a judge of mathematics reads as 1
    return np.format_float_positional(answer, trim="0") if isinstance(answer, float) else str(answer)
