"""How the user's own agent is run: a function in this process, or a program of its own.

It does not know what the agent's calls come to, nor rewards or budgets.
"""

import asyncio
import contextlib
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from laminar.errors import LaminarError
from laminar.plugins import load_attribute
from laminar.types import FailureKind, Prompt
from rollout.boundary import DaemonThreads, EpisodeError
from rollout.chat_api import MODEL
from rollout.environments.agent import Agent

_ATTENDED = Path(__file__).parent / "sandbox" / "attended.py"
_END_SECONDS = 5.0
"""How long a program that is given up may take to be killed with all that it started."""
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
        seconds: how long it may take, s; what it has not done by then is lost.
    """

    prompt: Prompt
    base_url: str
    api_key: str
    model: str = MODEL
    seconds: float = math.inf


class Driver(Protocol):
    """Runs agents."""

    def place(self) -> AbstractAsyncContextManager[None]:
        """What a run needs, and waits for before its clock starts."""
        ...

    async def run(self, task: Task, /) -> Any:
        """Run one to its end: a reward, terms by name, or None. Whatever it raises is the agent's failure."""
        ...

    async def close(self) -> None:
        """Let go of what was kept between runs."""
        ...


class AgentDriver:
    """What environment `agent` names."""

    def __init__(self, options: Agent.Options, threads: DaemonThreads | None = None) -> None:
        self._options = options
        self._threads = threads or DaemonThreads()

    def place(self) -> AbstractAsyncContextManager[None]:
        """A thread, for a plain function."""
        return self._threads.places if self._is_plain() else contextlib.nullcontext()

    async def run(self, task: Task) -> Any:
        """Call the function, or run the program."""
        return await (self._command(task) if self._options.command else self._function(task))

    async def close(self) -> None:
        """Nothing is kept."""

    def _is_plain(self) -> bool:
        if self._options.command:
            return False
        with contextlib.suppress(LaminarError):  # `run` tells it
            return not inspect.iscoroutinefunction(load_attribute(self._options.run, "environment.options.run"))
        return False

    async def _function(self, task: Task) -> Any:
        function: Callable[[Task], Any] = load_attribute(self._options.run, "environment.options.run")
        if inspect.iscoroutinefunction(function):
            return await function(task)
        deadline = asyncio.get_running_loop().time() + task.seconds
        return await self._threads.run(function, task, deadline=deadline)

    async def _command(self, task: Task) -> None:
        """Run the program; whatever it has started ends with it, with this call, and with this process."""
        root = task.base_url.removesuffix("/v1")
        keys = {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key}
        keys |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": task.api_key}
        lifeline, held = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", str(_ATTENDED), str(lifeline), *self._options.command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **keys}, start_new_session=True, pass_fds=(lifeline,),
            )  # fmt: skip
            os.close(lifeline)
            lifeline = -1
            try:
                _, errors, status = await asyncio.gather(_give(process, task), _last_bytes(process), process.wait())
            finally:
                os.close(held)
                held = -1
                await _ended(process)
        finally:
            for descriptor in (lifeline, held):
                if descriptor >= 0:
                    os.close(descriptor)
        if status:
            last = errors.decode("utf-8", "replace").strip().splitlines()
            text = f"the program ended with status {status}: {last[-1] if last else 'it said nothing'}"
            raise EpisodeError(FailureKind.ENVIRONMENT, text)


async def _give(process: asyncio.subprocess.Process, task: Task) -> None:
    """The task on its standard input, which it need not read."""
    assert process.stdin
    with contextlib.suppress(ConnectionError):
        process.stdin.write(_as_json(task.prompt))
        await process.stdin.drain()
    process.stdin.close()


async def _last_bytes(process: asyncio.subprocess.Process) -> bytes:
    assert process.stderr
    last = b""
    while part := await process.stderr.read(1 << 16):
        last = (last + part)[-_ERROR_BYTES:]
    return last


async def _ended(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _as_json(prompt: Prompt) -> bytes:
    content = prompt.content
    messages = content if isinstance(content, str) else [{"role": m.role, "content": m.content} for m in content]
    return json.dumps({"prompt_id": prompt.prompt_id, "prompt": messages, **prompt.fields}).encode()
