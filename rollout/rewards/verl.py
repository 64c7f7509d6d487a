"""Reward `verl`: a `compute_score` function written for verl, unchanged.

verl's Parquet files are read as they are: column `prompt` holds chat messages; `data_source`, `reward_model` (with
`ground_truth`) and `extra_info` are handed to the function by name, as verl does.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from laminar.config.section import Section
from laminar.plugins import load_attribute
from laminar.types import Prompt
from rollout.rewards.base import RewardContext


class Verl:
    """Calls the function in a thread, or awaits it."""

    class Options(Section):
        """Settings of `verl`."""

        function: str
        """`"package.module:compute_score"`, the user's."""
        arguments: dict[str, Any] = {}
        """Further arguments by name (verl's `reward_kwargs`)."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._function: Callable[..., Any] = load_attribute(options.function, "rewards.options.function")
        self.score = self._score_later if inspect.iscoroutinefunction(self._function) else self._score

    def check_prompt(self, prompt: Prompt) -> str | None:
        """What keeps this prompt from being judged."""
        model = prompt.fields.get("reward_model")
        if isinstance(model, Mapping) and "ground_truth" in model and "data_source" in prompt.fields:
            return None
        return f"prompt {prompt.prompt_id} lacks verl's columns `data_source` and `reward_model` with `ground_truth`"

    def _score(self, context: RewardContext) -> float:
        return self._number(self._function(**self._named(context)))

    async def _score_later(self, context: RewardContext) -> float:
        return self._number(await self._function(**self._named(context)))

    def _named(self, context: RewardContext) -> dict[str, Any]:
        fields = context.prompt.fields
        return {
            "data_source": fields["data_source"],
            "solution_str": context.completion,
            "ground_truth": fields["reward_model"]["ground_truth"],
            "extra_info": fields.get("extra_info"),
            **self._options.arguments,
        }

    def _number(self, value: Any) -> Any:
        """Verl's functions return a number, a table with `score`, or a tuple that begins with it."""
        if isinstance(value, Mapping):
            return value["score"]
        return value[0] if isinstance(value, tuple | list) else value
