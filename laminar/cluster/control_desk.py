"""The supervisor's side of control: takes signed requests, has them done, answers and records them.

Invariants: only genuine requests are obeyed, each once; a Redis that is away delays control and nothing else. It does not
know what the actions do.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import redis.exceptions
from redis.asyncio import Redis

from laminar.control import ANSWER_TTL_SECONDS, MAX_AGE_SECONDS, Answer, Request, Verb, answer_key, requests_key
from laminar.errors import LaminarError, reason
from laminar.telemetry.stream import TelemetryWriter

logger = logging.getLogger("laminar.supervisor")

Action = Callable[[Mapping[str, str]], Awaitable[str]]
"""Does what a request asks, given its arguments; answers with a sentence, or raises a `LaminarError`."""

POLL_SECONDS = 0.2
MAX_REMEMBERED = 1000


class ControlDesk:
    """Serves one run's control requests.

    Args:
        client: of the data module.
        run_id: of the run.
        token: what genuine requests are signed with.
        actions: by verb.
        telemetry: told of everything that was done.
        say: for the user.
        poll_seconds: between two looks for a request.
    """

    def __init__(
        self,
        client: Redis,
        run_id: str,
        token: str,
        actions: Mapping[Verb, Action],
        telemetry: TelemetryWriter,
        say: Callable[[str], None],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._poll_seconds = poll_seconds
        self._client, self._run_id, self._token, self._actions = client, run_id, token, actions
        self._telemetry, self._say = telemetry, say
        self._seen: deque[str] = deque(maxlen=MAX_REMEMBERED)

    async def run(self) -> None:
        """Serve until cancelled.

        Consumes: requests. Produces: actions, answers, telemetry. Waits for: the next request, by polling.
        """
        while True:
            try:
                pop: Any = self._client.lpop(requests_key(self._run_id))
                packed = await pop
                if packed is not None:
                    await self._serve(packed)
                    continue
            except (redis.exceptions.RedisError, OSError) as error:
                logger.info("control: the data module is away: %s", error)
            await asyncio.sleep(self._poll_seconds)

    async def _serve(self, packed: bytes) -> None:
        try:
            request = Request.read(packed)
        except (ValueError, TypeError, KeyError, AttributeError):
            logger.warning("control: a request of %s bytes cannot be read", len(packed))
            return
        answer = await self._answer(request)
        await self._client.set(
            answer_key(self._run_id, request.request_id), json.dumps(asdict(answer)), ex=ANSWER_TTL_SECONDS
        )

    async def _answer(self, request: Request) -> Answer:
        if why := self._refusal(request):
            logger.warning("control: refused %s by %s: %s", request.verb, request.asked_by, why)
            return Answer(False, why)
        self._seen.append(request.request_id)
        try:
            text = await self._actions[request.verb](request.arguments)
        except LaminarError as error:
            return Answer(False, str(error))
        except redis.exceptions.RedisError:
            raise
        except OSError as error:  # a full disk
            return Answer(False, f"{request.verb} failed: {reason(error)}; mend that, and ask again")
        except Exception as error:  # a request that nobody thought of must not end the run
            logger.exception("control: %s by %s failed", request.verb, request.asked_by)
            return Answer(False, f"{request.verb} failed: {error!r}; the run's output has it whole")
        logger.info("control: %s by %s: %s", request.verb, request.asked_by, text)
        self._say(f"{request.verb} (by {request.asked_by}): {text}")
        await self._telemetry.emit("control", fields={"text": text, "verb": request.verb, "by": request.asked_by})
        return Answer(True, text)

    def _refusal(self, request: Request) -> str:
        """Why a request is not obeyed; nothing if it is."""
        if not request.is_genuine(self._token):
            return "the request is not signed with the run's token; use the run folder's own token"
        if request.request_id in self._seen:
            return "the request was obeyed already; ask anew"
        age = time.time() - request.asked_at
        if abs(age) > MAX_AGE_SECONDS:
            return (
                f"the request was made {age:.0f} s ago by the supervisor's clock, which may differ from now by "
                f"{MAX_AGE_SECONDS:g} s; ask anew, or set the clocks of both machines right"
            )
        return ""
