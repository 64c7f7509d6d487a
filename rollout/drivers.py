"""How the user's own agent is run: a function in this process, or a program of its own.

It does not know what the agent's calls come to, nor rewards or budgets.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from laminar.plugins import load_attribute
from laminar.types import FailureKind, Prompt
from rollout.boundary import DaemonThreads, EpisodeError
from rollout.chat_api import MODEL
from rollout.environments.agent import Agent

_ERROR_BYTES = 2000
"""How much of a failed program's last words is kept."""


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent is given.

    Attributes:
        prompt: the task; the data row's other columns are in `fields`.
        base_url: of an OpenAI client; an Anthropic client takes it without `/v1`.
        api_key: ties calls to this trajectory.
        model: what to name as the model.
    """

    prompt: Prompt
    base_url: str
    api_key: str
    model: str = MODEL


class Driver(Protocol):
    """Runs agents."""

    async def run(self, task: Task, /) -> Any:
        """Run one to its end: a reward, terms by name, or None. Whatever it raises is the agent's failure."""
        ...

    async def close(self) -> None:
        """Let go of what was kept between runs."""
        ...


class AgentDriver:
    """What environment `agent` names."""

    def __init__(self, options: Agent.Options) -> None:
        self._options = options
        self._threads = DaemonThreads()

    async def run(self, task: Task) -> Any:
        """Call the function, or run the program."""
        return await (self._command(task) if self._options.command else self._function(task))

    async def close(self) -> None:
        """Nothing is kept."""

    async def _function(self, task: Task) -> Any:
        function: Callable[[Task], Any] = load_attribute(self._options.run, "environment.options.run")
        if inspect.iscoroutinefunction(function):
            return await function(task)
        async with self._threads.places:
            return await self._threads.run(function, task)

    async def _command(self, task: Task) -> None:
        """Run the program in a session of its own, which is killed as a whole."""
        root = task.base_url.removesuffix("/v1")
        keys = {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key}
        keys |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": task.api_key}
        process = await asyncio.create_subprocess_exec(
            *self._options.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **keys},
            start_new_session=True,
        )
        try:
            _, errors = await process.communicate(_as_json(task.prompt))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            last = errors[-_ERROR_BYTES:].decode("utf-8", "replace").strip().splitlines()
            text = f"the program ended with status {process.returncode}: {last[-1] if last else 'it said nothing'}"
            raise EpisodeError(FailureKind.ENVIRONMENT, text)


def _as_json(prompt: Prompt) -> bytes:
    content = prompt.content
    messages = content if isinstance(content, str) else [{"role": m.role, "content": m.content} for m in content]
    return json.dumps({"prompt_id": prompt.prompt_id, "prompt": messages, **prompt.fields}).encode()
