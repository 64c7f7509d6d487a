"""Reward `reasoning_gym`: the answer's score by the task's own scorer, for any task of that package.

`python -m rollout.reasoning_data` writes the data, whose column `entry` the scorer needs. It runs in a process that is
killed when it takes too long.
"""

import re
from typing import Any

from pydantic import Field

from laminar.config.section import Section
from laminar.types import Prompt
from rollout.rewards.base import RewardContext
from rollout.rewards.pool import ProcessPool


class ReasoningGym:
    """Scores between 0 and 1, as the task does."""

    class Options(Section):
        """Settings of `reasoning_gym`."""

        tag: str = "answer"
        """The answer is what the last `<tag>...</tag>` holds; without one, or if this is empty, the whole text is."""
        num_processes: int = Field(1, ge=1)
        """Answers that one worker judges at once."""
        max_seconds: float = Field(10.0, gt=0)
        """A longer check is a verifier failure."""

    def __init__(self, options: Options) -> None:
        self._tag = (
            re.compile(rf"<{re.escape(options.tag)}>(.*?)</{re.escape(options.tag)}>", re.DOTALL) if options.tag else None
        )
        self.max_running = options.num_processes
        self._pool = ProcessPool(
            "rollout.rewards.reasoning_gym:judge",
            size=options.num_processes,
            seconds=options.max_seconds,
            warm_up=["basic_arithmetic", {"answer": "1", "metadata": {}}, "1"],
        )

    @property
    def pool(self) -> ProcessPool:
        """The processes."""
        return self._pool

    def check_prompt(self, prompt: Prompt) -> str | None:
        """What keeps this prompt from being judged."""
        entry = prompt.fields.get("entry")
        if isinstance(entry, dict) and "answer" in entry and "source_dataset" in entry.get("metadata", {}):
            return None
        return f"prompt {prompt.prompt_id} has no column `entry` of reasoning_gym; make data by rollout.reasoning_data"

    def extract(self, completion: str) -> str:
        """The part of a completion that counts as its answer."""
        found = self._tag.findall(completion) if self._tag else []
        return (found[-1] if found else completion).strip()

    def score(self, context: RewardContext) -> float:
        """Runs in a thread, which waits for a process."""
        entry = context.prompt.fields["entry"]
        return float(self._pool.call(entry["metadata"]["source_dataset"], entry, self.extract(context.completion)))


def judge(task: str, entry: dict[str, Any], answer: str) -> float:
    """Runs in a pool's process: the score by the task's own scorer."""
    import reasoning_gym

    score: Any = reasoning_gym.get_score_answer_fn(task)
    return float(score(answer, entry))
