"""The tools of one episode: made from the config, opened, called under a deadline, closed.

Invariants: whatever the policy sends, it gets an answer as text; what is the infrastructure's fault raises `EpisodeError` of
kind `tool`. It does not know how calls are written.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from laminar.config.section import Plugin, Section
from laminar.errors import ConfigError
from laminar.plugins import resolve, validate_options
from laminar.types import FailureKind
from rollout.boundary import DaemonThreads, EpisodeError, guard
from rollout.tools import TOOLS
from rollout.tools.base import Tool, ToolError, result_text, tool_from_function
from rollout.tools.calls import Call

ANSWERED_ERRORS = (ValueError, LookupError, ArithmeticError)
"""What a tool may raise to tell the policy that its arguments do not work."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to: the text for the policy, and whether it is a result."""

    text: str
    is_result: bool


@dataclass(slots=True)
class Toolbox:
    """Open tools, by name.

    Attributes:
        entries: what the config lists: kinds, or kinds with options.
        seconds: deadline of one call.
        max_characters: longer results are cut.
    """

    entries: Sequence[str | Plugin]
    seconds: float
    max_characters: int
    tools: dict[str, Tool] = field(default_factory=dict)
    _sources: AsyncExitStack = field(default_factory=AsyncExitStack)
    _threads: DaemonThreads = field(default_factory=DaemonThreads)

    async def open(self) -> None:
        """Make every tool ready.

        Raises:
            ConfigError: two have one name.
        """
        for index, entry in enumerate(self.entries):
            for tool in await self._open_entry(index, entry):
                if tool.name in self.tools:
                    raise ConfigError(f"two tools are called {tool.name!r}; rename one")
                self.tools[tool.name] = tool

    async def close(self) -> None:
        """Close every source."""
        await self._sources.aclose()

    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """All tools' schemas, in the order of the config."""
        return tuple(tool.schema for tool in self.tools.values())

    async def answer(self, call: Call) -> Answer:
        """Run one call.

        Raises:
            EpisodeError: of kind `tool`: it took too long, or broke.
        """
        tool = self.tools.get(call.name)
        if tool is None:
            return Answer(f"error: there is no tool {call.name!r}, only {', '.join(self.tools)}", is_result=False)
        try:
            text = result_text(await self._run(tool, tool.check(call.arguments)))
        except ANSWERED_ERRORS as error:
            return Answer(f"error: {error or type(error).__name__}"[: self.max_characters], is_result=False)
        if len(text) > self.max_characters:
            text = f"{text[: self.max_characters]}\n({len(text) - self.max_characters} characters cut)"
        return Answer(text, is_result=True)

    async def _run(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        run: Callable[[], Awaitable[Any]]
        if inspect.iscoroutinefunction(tool.call):
            run = functools.partial(_caught, functools.partial(tool.call, **arguments))
        else:
            run = functools.partial(_caught, functools.partial(self._threads.run, functools.partial(tool.call, **arguments)))
        outcome = await guard(
            run,
            what=f"tool {tool.name!r}",
            kind=FailureKind.TOOL,
            seconds=self.seconds,
            timeout_kind=FailureKind.TOOL,
            limit="environment.options.tool_seconds",
        )
        if isinstance(outcome, _Refused):
            raise ToolError(str(outcome.error) or type(outcome.error).__name__)
        return outcome

    async def _open_entry(self, index: int, entry: str | Plugin) -> Sequence[Tool]:
        attribute, options = load_entry(index, entry)
        if not isinstance(attribute, type):
            return [tool_from_function(attribute)]
        source = attribute() if options is None else attribute(options)
        self._sources.push_async_callback(source.close)
        tools: Sequence[Tool] = await source.open()
        return tools


@dataclass(frozen=True, slots=True)
class _Refused:
    """A tool's own error, on its way to the policy past the boundary that would make a failure of it."""

    error: Exception


async def _caught(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except EpisodeError:
        raise
    except ANSWERED_ERRORS as error:
        return _Refused(error)


def name_of(attribute: Any) -> str | None:
    """What a function, or a class with a `tool_name`, is called as a tool; None of a source that tells once it is open."""
    name = getattr(attribute, "tool_name", None) if isinstance(attribute, type) else tool_from_function(attribute).name
    return name if isinstance(name, str) else None


def load_entry(index: int, entry: str | Plugin) -> tuple[Any, Section | None]:
    """The function or source class that the entry at `index` of the tools stands for, and its options.

    Raises:
        ConfigError: there is none, or its options are wrong.
    """
    kind, options = (entry, {}) if isinstance(entry, str) else (entry.kind, entry.options)
    where = f"environment.options.tools[{index}]"
    attribute = resolve(kind, TOOLS, where)
    if not callable(attribute):
        raise ConfigError(f"tool {kind!r} is {attribute!r:.80}, not a function or class")
    if not isinstance(attribute, type):
        tool_from_function(attribute)
    elif not (hasattr(attribute, "open") and hasattr(attribute, "close")):
        raise ConfigError(f"tool {kind!r}: a class must have `open` and `close`; see rollout/README.md")
    return attribute, validate_options(attribute, options, f"{where}.options")
