"""What an episode plays against.

An environment is single-use: made for one episode, reset once, stepped until done, closed. It sees text, never token ids.
It may have a nested `Options(Section)`; then it is built with one. This module does not know engines, tokens or rewards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from laminar.types import Message, Prompt


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy is shown next.

    Attributes:
        content: raw text, or chat messages. An episode that began with messages goes on with messages: later ones are only
            what is new (a tool's result, a user's answer), and plain text then stands for one message of the user.
        tools: at reset only, the JSON schemas of functions that the chat template is to show.
    """

    content: str | tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an answer led to.

    Attributes:
        done: whether the episode is over.
        observation: what the policy is shown next; None when done.
        reward_terms: named rewards of this step, one finite number each; the steps' terms are summed by name.
        counts: what is worth counting in this step, such as malformed calls; summed by name into the trajectory's counts.
    """

    done: bool
    observation: Observation | None = None
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


class Environment(Protocol):
    """One episode's world. Whatever its methods raise becomes a failed trajectory, never a reward of 0.

    A class attribute `resumable = True` says that the same prompt and answers always lead to the same observations: when a
    worker dies, another makes the environment anew, steps it with the answers that were kept, and goes on from there.
    Without it the trajectory starts again from its prompt.
    """

    async def reset(self, prompt: Prompt, /) -> Observation:
        """Begin the task."""
        ...

    async def step(self, completion: str, /) -> StepResult:
        """React to the policy's answer."""
        ...

    async def close(self) -> None:
        """Let go of everything; called exactly once, also after a failure."""
        ...
