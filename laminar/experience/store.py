"""One run's keys on a server, and the scripts that write them.

Invariants: all keys start with the run's prefix; a request may be repeated without a second effect, so one that got no
answer, or found the server's disk full, is repeated, with back-off, until the outage deadline; a script that the server has
forgotten is loaded again.

This module does not know what the scripts mean.
"""

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec
import redis
from redis.asyncio import Redis

from laminar.errors import ExperienceError, reason
from laminar.experience.answers import Event
from laminar.experience.client import keep_cancellation

T = TypeVar("T")

OUTAGE_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 1.0
SCRIPT_ERROR_MARK = "LAMINAR "
_encoder = msgspec.msgpack.Encoder()
UNWRITABLE_MARK = "MISCONF "
"""A server that cannot write its file (a full disk) refuses writes with this until it can again."""
LOST = (redis.ConnectionError, redis.TimeoutError, ConnectionError, TimeoutError)


class ExperienceStore:
    """One run's data on a server.

    Args:
        client: from `connect`. It belongs to the caller, and to one event loop.
        run_id: name of the run; part of every key.
        outage_seconds: how long a server may be away, or its disk full, before a request gives up.
    """

    def __init__(self, client: Redis, run_id: str, *, outage_seconds: float = OUTAGE_SECONDS) -> None:
        self.client = client
        self.prefix = f"laminar:{run_id}:"
        self._outage_seconds = outage_seconds

    def key(self, name: str) -> str:
        """Full name of one of the run's keys."""
        return self.prefix + name

    async def run(self, script: str, request_id: str | None = None, **arguments: Any) -> Any:
        """Run a script; repeated until it is answered.

        Args:
            script: file name in `scripts/`, without its ending.
            request_id: names the request when the caller repeats it itself; default: a new one.
            arguments: plain values, as the script's first lines list them.

        Returns:
            The answer, still packed (see `unpack`), or a list if the script answers several parts.

        Raises:
            ExperienceError: the script refused, or the server was away for too long.
        """
        command = self.command(script, request_id or new_request_id(), arguments)
        return await self.insist(script, lambda: self._evaluate(script, command))

    def command(self, script: str, request_id: str, arguments: Mapping[str, Any], *payload: bytes) -> tuple[Any, ...]:
        """The EVALSHA command of a script, for pipelines; bytes go beside the arguments, which the script reads."""
        _, digest = _script(script)
        return ("EVALSHA", digest, 1, self.prefix, request_id, _encoder.encode(arguments), *payload)

    def batch(self, script: str, requests: Iterable[tuple[str, Any, bytes]]) -> tuple[Any, ...]:
        """The command that runs a script for many (request id, arguments, payload), answered by a list.

        They see one moment; settings and headers are read once; an error among the answers is a value. Ids and arguments
        travel as one list: every argument of a command costs the client more than a trajectory's own fields.
        """
        _, digest = _script(script, repeated=True)
        rows = list(requests)
        packed = _encoder.encode([(name, arguments) for name, arguments, _ in rows])
        return ("EVALSHA", digest, 1, self.prefix, "", packed, *[payload for _, _, payload in rows])

    async def load(self, script: str, *, repeated: bool = False) -> None:
        """Give the script, or its form for many requests, to the server."""
        await self.client.script_load(_script(script, repeated=repeated)[0])

    async def insist(self, name: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent request while the server cannot be reached, or cannot write its file.

        Raises:
            ExperienceError: the outage deadline has passed, or the server refused.
        """
        deadline = time.monotonic() + self._outage_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await keep_cancellation(attempt())
            except (*LOST, redis.ResponseError) as error:
                is_unwritable = str(error).startswith(UNWRITABLE_MARK)
                if isinstance(error, redis.ResponseError) and not is_unwritable:
                    raise as_experience_error(error) from error
                if time.monotonic() + pause > deadline:
                    what = "unable to write its file" if is_unwritable else "out of reach"
                    raise ExperienceError(
                        f"Redis has been {what} for {self._outage_seconds:.0f} s at request {name!r} ({reason(error)}); "
                        "see its log, and resume the run when it is back"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def events(self, after: str = "-", max_events: int = 100) -> list[Event]:
        """Events later than the one named `after` (default: the oldest kept ones), oldest first."""
        start = after if after == "-" else f"({after}"
        stream = self.key("events")
        rows: Any = await self.insist("events", lambda: self.client.xrange(stream, min=start, count=max_events))
        return [_event(*row) for row in rows]

    async def wait_events(self, after: str, seconds: float) -> list[Event]:
        """Events later than the one named `after` (`0-0`: all kept ones), as soon as there is one; none after `seconds`."""
        stream, block = self.key("events"), round(seconds * 1000)
        answer: Any = await self.insist("wait_events", lambda: self.client.xread({stream: after}, block=block))
        streams = answer.items() if isinstance(answer, dict) else answer or ()
        return [_event(*row) for _, rows in streams for row in rows]

    async def _evaluate(self, script: str, command: tuple[Any, ...]) -> Any:
        try:
            return await self.client.execute_command(*command)
        except redis.exceptions.NoScriptError:
            await self.load(script)
            return await self.client.execute_command(*command)


def new_request_id() -> str:
    """A name that no other request has."""
    return os.urandom(16).hex()


def unpack(packed: Any) -> Any:
    """Read a packed answer: maps with text keys, lists, text, numbers."""
    return msgspec.msgpack.decode(packed)


def as_experience_error(error: redis.ResponseError) -> ExperienceError:
    """A script's refusal, or the server's, as one of ours."""
    text = str(error)
    return ExperienceError(text.removeprefix(SCRIPT_ERROR_MARK) if text.startswith(SCRIPT_ERROR_MARK) else f"Redis: {text}")


def _event(row_id: bytes, fields: Mapping[bytes, bytes]) -> Event:
    return Event(row_id.decode(), fields[b"kind"].decode(), fields[b"group"].decode(), fields[b"detail"].decode())


@cache
def _script(name: str, *, repeated: bool = False) -> tuple[str, str]:
    """A script's text, with the prelude after its first line, and its digest; or the same as the body of a loop."""
    folder = resources.files("laminar.experience") / "scripts"
    first, _, body = (folder / f"{name}.lua").read_text(encoding="utf-8").partition("\n")
    if repeated:
        body = (folder / "repeat.lua").read_text(encoding="utf-8").replace("-- BODY", body)
    text = "\n".join((first, (folder / "prelude.lua").read_text(encoding="utf-8"), body))
    return text, hashlib.sha1(text.encode()).hexdigest()
