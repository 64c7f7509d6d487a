"""Environment `remote`: one behind HTTP, on whatever machine (`rollout.environments.remote_wire` says what is sent).

A call without an answer is sent again, since the server answers a call once, however often it comes; what was raised
there is a failure with the kind that the server says. An episode that the server has forgotten is a failure `environment`.
"""

import asyncio
import json
import os
import uuid
from typing import Any

import aiohttp
from pydantic import Field

from laminar.config.addresses import HttpUrl
from laminar.config.section import Section
from laminar.types import FailureKind, Prompt
from rollout.boundary import EpisodeError
from rollout.environments.base import Observation, StepResult
from rollout.environments.remote_wire import (
    Body,
    WireError,
    prompt_body,
    read_error,
    read_observation,
    read_step,
)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
_CLOSE_SECONDS = 5.0
_BUSY = (429, 502, 503, 504)
"""Statuses of servers, and of what stands before them, that have not begun with the call."""


class Remote:
    """One episode on a server."""

    gives_reward = True

    class Options(Section):
        """Settings of `remote`."""

        url: HttpUrl
        """Of the server, such as `http://games.internal:8100`."""
        token_variable: str = ""
        """Environment variable with the server's token; empty: none is sent."""
        call_seconds: float = Field(60, gt=0)
        """Deadline of one try of a call."""
        retries: int = Field(3, ge=0)
        """Further tries of a call that was not answered."""
        answers_once: bool = True
        """The server knows a repeated call by its number, as ours does; if not, only what it never got is sent again."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._id, self._number = uuid.uuid4().hex, 0
        self._session: aiohttp.ClientSession | None = None

    async def reset(self, prompt: Prompt) -> Observation:
        """Begin it there."""
        variable = self._options.token_variable
        head = {"Authorization": f"Bearer {os.environ.get(variable, '')}"} if variable else {}
        self._session = aiohttp.ClientSession(headers=head, timeout=aiohttp.ClientTimeout(total=self._options.call_seconds))
        answer = await self._call("reset", {"prompt": prompt_body(prompt)})
        try:
            return read_observation(answer.get("observation"))
        except WireError as error:
            raise self._nonsense("reset", error) from error

    async def step(self, completion: str) -> StepResult:
        """React there."""
        try:
            return read_step(await self._call("step", {"completion": completion}))
        except WireError as error:
            raise self._nonsense("step", error) from error

    async def close(self) -> None:
        """Have it closed there; a server out of reach closes it by itself after a while."""
        if self._session is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._post("close", {"id": self._id})
        except (aiohttp.ClientError, OSError):
            return
        finally:
            await self._session.close()

    async def _call(self, name: str, fields: Body) -> Body:
        """One call, in as many tries as are allowed."""
        body = {"id": self._id, "number": self._number, **fields}
        self._number += 1
        tries = 0
        while True:
            tries += 1
            try:
                return self._checked(name, *await self._post(name, body))
            except (aiohttp.ClientError, OSError) as error:  # OSError: TimeoutError, and servers that are busy
                was_received = not isinstance(error, aiohttp.ClientConnectorError | _BusyError)
                if tries > self._options.retries or (was_received and not self._options.answers_once):
                    text = f"{name} at {self._options.url} failed {tries} times; the last: {type(error).__name__}: {error}"
                    raise EpisodeError(FailureKind.ENVIRONMENT, text) from error
            await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2 ** (tries - 1), _LONGEST_PAUSE_SECONDS))

    async def _post(self, name: str, body: Body) -> tuple[int, str]:
        assert self._session is not None
        async with self._session.post(f"{self._options.url.rstrip('/')}/{name}", json=body) as response:
            return response.status, await response.text()

    def _checked(self, name: str, status: int, text: str) -> Body:
        """The answer's body.

        Raises:
            _BusyError: the server has not begun.
            EpisodeError: it has failed, or answers nonsense.
        """
        try:
            body: Any = json.loads(text)
        except ValueError:
            body = None
        if status < 400:
            if not isinstance(body, dict):
                raise self._nonsense(name, WireError(f"{text[:80]!r} is no JSON table"))
            return body
        if failure := read_error(body):
            raise EpisodeError(failure[0], f"{self._options.url}: {failure[1]}")
        if status in _BUSY:
            raise _BusyError(f"status {status}")
        raise EpisodeError(FailureKind.ENVIRONMENT, f"{name} at {self._options.url} answered {status}: {text[:200]}")

    def _nonsense(self, name: str, error: WireError) -> EpisodeError:
        return EpisodeError(FailureKind.USER_BUG, f"{name} at {self._options.url} answered nonsense: {error}")


class _BusyError(OSError):
    """The server has not begun with the call."""
