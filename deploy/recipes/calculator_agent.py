"""An agent that knows the `openai` client and nothing of Laminar: it offers a calculator until it gets an answer."""

import functools
import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

from rollout.tools.calculator import calculate

MAX_CALLS = 3
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


async def solve(task: Any) -> float:
    """1 for the right answer within `MAX_CALLS` calls, else 0."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=connections())
    messages: list[Any] = [{"role": "user", "content": task.prompt.content}]
    for _ in range(MAX_CALLS):
        try:
            reply = await client.chat.completions.create(model=task.model, messages=messages, tools=[TOOL])
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return 0.0  # the trajectory's budget of tokens or turns is used up
        message: Any = reply.choices[0].message
        if not message.tool_calls:
            return float(message.content == task.prompt.fields["answer"])
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": answer(call.function.arguments)}
            for call in message.tool_calls
        ]
    return 0.0


@functools.cache
def connections() -> DefaultAsyncHttpxClient:
    """One for all trajectories, since making one takes tens of milliseconds of CPU."""
    return DefaultAsyncHttpxClient()


def answer(arguments: str) -> str:
    """The calculator's answer, or what is wrong with the call."""
    try:
        return calculate(json.loads(arguments)["expression"])
    except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
        return f"error: {error}"
