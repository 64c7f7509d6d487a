"""Tool source `mcp`: the tools of a Model Context Protocol server, by the official SDK.

A server that is a program lives as long as the episode. What a tool calls an error is told to the policy; a server that dies
is a failure of kind `tool`.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic import Field, model_validator

from laminar.config.addresses import http_fault
from laminar.config.section import Section
from laminar.errors import ConfigError, DeadlineError
from laminar.types import FailureKind
from rollout.boundary import EpisodeError
from rollout.tools.base import Tool, ToolError

_CLOSE_SECONDS = 5.0
"""How long a server may take to end by itself."""


class Mcp:
    """One server."""

    class Options(Section):
        """Settings of `mcp`."""

        command: list[str] = Field(default_factory=list)
        """A program that speaks the protocol on its standard streams."""
        url: str = ""
        """Or a server's address (streamable HTTP)."""
        only: list[str] = Field(default_factory=list)
        """Names of the tools to offer; empty: all."""
        start_seconds: float = Field(30, gt=0)
        """Deadline for the server to start and tell its tools."""

        @model_validator(mode="after")
        def _one_of_both(self) -> "Mcp.Options":
            if bool(self.command) == bool(self.url):
                raise ValueError("give either `command` or `url`")
            if self.url and (fault := http_fault(self.url)):
                raise ValueError(f"url is {self.url!r}: {fault}")
            return self

    def __init__(self, options: Options) -> None:
        self._options = options
        self._session: Any = None
        self._task: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()

    async def open(self) -> Sequence[Tool]:
        """Start, and ask for the tools.

        Raises:
            ConfigError: `only` names a tool that the server does not have.
            DeadlineError: the server did not start in time.
        """
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready))  # the SDK wants to be left by the task that entered it
        done, _ = await asyncio.wait({ready, self._task}, timeout=self._options.start_seconds, return_when="FIRST_COMPLETED")
        if not done:
            raise DeadlineError("an MCP server to start", self._options.start_seconds)
        if not ready.done():
            await self._task
        tools = {tool.name: tool for tool in await ready}
        for name in self._options.only:
            if name not in tools:
                raise ConfigError(f"the MCP server has no tool {name!r}, only {', '.join(tools)}; correct `only`")
        return [self._tool(tools[name]) for name in self._options.only or tools]

    async def close(self) -> None:
        """End the connection, and the program."""
        self._leave.set()
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
            for task in late:
                task.cancel()

    async def _hold(self, ready: "asyncio.Future[Any]") -> None:
        from mcp import ClientSession

        async with self._streams() as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            self._session = session
            ready.set_result(await _list_tools(session))
            await self._leave.wait()

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self._options.url:
            async with streamable_http_client(self._options.url) as streams:
                yield streams[0], streams[1]
            return
        program, *arguments = self._options.command
        async with stdio_client(StdioServerParameters(command=program, args=arguments)) as (read, write):
            yield read, write

    def _tool(self, told: Any) -> Tool:
        schema = {
            "type": "function",
            "function": {"name": told.name, "description": told.description or "", "parameters": told.input_schema},
        }
        name = told.name

        async def call(**arguments: Any) -> str:
            return await self._call(name, arguments)

        return Tool(name, schema, call, dict)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        from mcp import MCPError

        assert self._task is not None
        if self._task.done():
            raise EpisodeError(FailureKind.TOOL, "the MCP server has ended")
        try:
            result = await self._session.call_tool(name, dict(arguments))
        except MCPError as error:
            if self._task.done() or await self._is_lost(error):
                raise EpisodeError(FailureKind.TOOL, f"the MCP server failed: {error}") from error
            raise ToolError(str(error)) from error
        text = "\n".join(part.text for part in result.content if getattr(part, "text", None) is not None)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _is_lost(self, error: Any) -> bool:
        """Whether an error tells of a closed connection; servers use its code for errors of their own, so they are asked."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if error.code != CONNECTION_CLOSED:
            return False
        try:
            await self._session.send_ping()
        except MCPError as answer:
            return bool(answer.code == CONNECTION_CLOSED)
        return False


async def _list_tools(session: Any) -> list[Any]:
    """All tools, page by page."""
    from mcp.types import PaginatedRequestParams

    page = await session.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
        tools += page.tools
    return tools
