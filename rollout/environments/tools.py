"""Environment `tools`: the policy calls functions until a turn has no call; that turn is its answer.

Malformed calls and wrong arguments are answered to the policy, and counted. What is the tools' own fault is a failure.
"""

import json
from collections import Counter
from typing import Literal

from pydantic import Field, field_validator

from laminar.config.section import Plugin, Section
from laminar.types import Message, Prompt
from rollout.environments.base import Observation, StepResult
from rollout.tools.calls import PARSERS, Call
from rollout.tools.toolbox import Answer, Toolbox, load_entry, name_of


class Tools:
    """One task with tools."""

    class Options(Section):
        """Settings of `tools`."""

        tools: list[str | Plugin] = Field(min_length=1)
        """What may be called: `calculate`, `search`, `"package.module:function"`, or a table with `kind` and `options`."""
        call_format: Literal["hermes", "llama", "pythonic"] = "hermes"
        """How the model writes calls: `hermes` (also Qwen), `llama` (3, 3.1), `pythonic` (3.2, 4)."""
        system: str = ""
        """System message, if the prompt has none; `{tools}` stands for the schemas, for templates that do not show them."""
        result_role: Literal["tool", "user"] = "tool"
        """Who tells the results, for templates without the role `tool`."""
        max_calls_per_turn: int = Field(8, ge=1)
        """Further calls of one turn are refused."""
        max_result_characters: int = Field(4000, ge=1)
        """Longer results are cut."""
        tool_seconds: float = Field(30, gt=0)
        """Deadline of one call; missing it is a failure of kind `tool`."""

        @field_validator("tools")
        @classmethod
        def _loadable(cls, tools: list[str | Plugin]) -> list[str | Plugin]:
            names: dict[str, int] = {}
            for index, entry in enumerate(tools):
                name = name_of(load_entry(index, entry)[0])
                if name is not None and name in names:
                    raise ValueError(f"tools {names[name]} and {index} are both called {name!r}; remove or rename one")
                names |= {} if name is None else {name: index}
            return tools

    def __init__(self, options: Options) -> None:
        self._options = options
        self._parse = PARSERS[options.call_format]
        self._box = Toolbox(options.tools, options.tool_seconds, options.max_result_characters)

    async def reset(self, prompt: Prompt) -> Observation:
        """The prompt as messages, with the tools' schemas."""
        await self._box.open()
        content = prompt.content
        messages = (Message("user", content),) if isinstance(content, str) else content
        if self._options.system and messages[0].role != "system":
            schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self._box.schemas())
            messages = (Message("system", self._options.system.replace("{tools}", schemas)), *messages)
        return Observation(messages, self._box.schemas())

    async def step(self, completion: str) -> StepResult:
        """Run the turn's calls; done if it has none."""
        turn = self._parse(completion)
        if not turn.calls:
            return StepResult(done=True)
        counts: Counter[str] = Counter()
        results = [await self._answer(call, place, counts) for place, call in enumerate(turn.calls)]
        messages = tuple(Message(self._options.result_role, answer.text) for answer in results)
        return StepResult(done=False, observation=Observation(messages), counts=counts)

    async def close(self) -> None:
        """Close the tools."""
        await self._box.close()

    async def _answer(self, call: Call | str, place: int, counts: Counter[str]) -> Answer:
        if isinstance(call, str):
            counts["malformed_calls"] += 1
            return Answer(f"error: this call cannot be read: {call}", is_result=False)
        if place >= self._options.max_calls_per_turn:
            counts["refused_calls"] += 1
            limit = self._options.max_calls_per_turn
            return Answer(f"error: at most {limit} calls are allowed at once", is_result=False)
        answer = await self._box.answer(call)
        counts["tool_calls" if answer.is_result else "failed_calls"] += 1
        return answer
