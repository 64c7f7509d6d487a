"""Control of a live run: signed requests in the data module, which the supervisor obeys and answers.

Invariants: a request carries a signature made with the run's token, never the token; the supervisor obeys each request once,
and none that was asked of an earlier life or is older than `MAX_AGE_SECONDS`. This module does not know what the verbs do.
"""

import asyncio
import enum
import hashlib
import hmac
import json
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import redis.exceptions
from redis.asyncio import Redis

from laminar.errors import ConfigError, RunNotAliveError, reason
from laminar.experience.client import connect
from laminar.run_folder import RunFolder

ANSWER_SECONDS = 15.0
"""How long an answer is waited for."""
POLL_SECONDS = 0.05
MAX_AGE_SECONDS = 60.0
ANSWER_TTL_SECONDS = 120


class Verb(enum.StrEnum):
    """What can be asked of a live run."""

    STOP = "stop"
    PAUSE = "pause"
    UNPAUSE = "unpause"
    SET = "set"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `asked_at` in Unix seconds."""

    request_id: str
    verb: Verb
    arguments: dict[str, str]
    asked_by: str
    asked_at: float
    signature: str = field(default="")

    @classmethod
    def make(cls, token: str, verb: Verb, arguments: dict[str, str], asked_by: str) -> "Request":
        """A signed request of now."""
        plain = cls(os.urandom(8).hex(), verb, arguments, asked_by, time.time())
        return cls(**{**asdict(plain), "signature": plain.signed_with(token)})

    @classmethod
    def read(cls, data: bytes) -> "Request":
        """Read what `to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        values = json.loads(data)
        texts = (values["request_id"], values["asked_by"], values["signature"], *values["arguments"].values())
        if not all(isinstance(text, str) for text in texts) or not isinstance(values["asked_at"], float):
            raise ValueError("a value of the request has another type")
        if not values["signature"].isascii():
            raise ValueError("the signature is no hexadecimal number")
        return cls(**{**values, "verb": Verb(values["verb"])})

    def to_json(self) -> str:
        """The request's text."""
        return json.dumps(asdict(self))

    def signed_with(self, token: str) -> str:
        """The signature that this token gives: HMAC-SHA256 of all other fields."""
        values = {name: value for name, value in asdict(self).items() if name != "signature"}
        return hmac.new(token.encode(), json.dumps(values, sort_keys=True).encode(), hashlib.sha256).hexdigest()

    def is_genuine(self, token: str) -> bool:
        """Whether it was signed with the token."""
        return hmac.compare_digest(self.signature, self.signed_with(token))


@dataclass(frozen=True, slots=True)
class Answer:
    """What the supervisor says: what it did, or why it refused."""

    is_done: bool
    text: str


def requests_key(run_id: str) -> str:
    """The list of requests, oldest first."""
    return f"laminar:{run_id}:control"


def answer_key(run_id: str, request_id: str) -> str:
    """Where one request is answered."""
    return f"laminar:{run_id}:control:{request_id}"


async def forget_requests(client: Redis, run_id: str) -> None:
    """Drop what was asked of earlier lives; before this life can be asked anything."""
    await client.delete(requests_key(run_id))


async def ask(client: Redis, run_id: str, request: Request, seconds: float = ANSWER_SECONDS) -> str:
    """Have the supervisor of a run do something; returns what it did, in words.

    Raises:
        ConfigError: it refused.
        RunNotAliveError: nobody answered.
    """
    deadline, key = time.monotonic() + seconds, answer_key(run_id, request.request_id)
    queue: Any = client.rpush(requests_key(run_id), request.to_json())
    await queue
    while (packed := await client.get(key)) is None:
        if time.monotonic() > deadline:
            raise RunNotAliveError(
                f"the supervisor of run {run_id} did not answer within {seconds:g} s; look at its output, or end its process"
            )
        await asyncio.sleep(POLL_SECONDS)
    answer = Answer(**json.loads(packed))
    if not answer.is_done:
        raise ConfigError(answer.text)
    return answer.text


async def ask_run(folder: RunFolder, verb: Verb, arguments: dict[str, str], asked_by: str) -> str:
    """`ask`, for a run's folder.

    Raises:
        RunNotAliveError: the run is not alive, or its data module is not up yet.
        ConfigError: the supervisor refused.
    """
    state = folder.read_state()
    if not folder.is_alive():
        raise RunNotAliveError(f"run {state.run_id} is not alive ({state.status}); `laminar resume` starts it again")
    if not state.redis_url:
        raise RunNotAliveError(
            f"run {state.run_id} is {state.status}, and cannot be told anything now; try again in a moment"
        )
    client = await connect(state.redis_url)
    try:
        return await ask(client, state.run_id, Request.make(state.token, verb, arguments, asked_by))
    except (redis.exceptions.RedisError, OSError) as error:
        raise RunNotAliveError(
            f"the data module of run {state.run_id} went away while it was asked ({reason(error)})"
        ) from error
    finally:
        await client.aclose()
