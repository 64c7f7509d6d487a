"""An HTTP server in front of the policy that speaks OpenAI's and Anthropic's protocols, so that any agent can be trained.

A key, made for one trajectory, ties calls together; what the engine draws is recorded with ids, log-probs and versions. The
agent may post its reward. Replies are sampled whole before a stream begins. It listens on loopback only.
It does not know agents, groups or weights.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

from rollout.boundary import EpisodeError
from rollout.chat_api import (
    MODEL,
    Replies,
    Wanted,
    before_stop,
    chat_chunks,
    chat_response,
    completion_response,
    read_messages,
    read_tools,
    read_wanted,
    reading,
    reply_message,
)
from rollout.clock import EpisodeClock
from rollout.conversations import BadCallError, Conversations, Reply, SpentError
from rollout.messages_api import message_events, message_response, read_message_request
from rollout.rewards.scorer import finite_number
from rollout.tools.calls import ParsedTurn

logger = logging.getLogger("laminar.rollout.gateway")

_MAX_BODY_BYTES = 64 * 1024**2
_CLOSE_SECONDS = 1.0
"""How long calls may still be answered when it closes; their trajectories are over."""
Parse = Callable[[str], ParsedTurn]


@dataclass(slots=True)
class Session:
    """One trajectory's calls.

    Attributes:
        conversations: what they come to as tokens.
        parse: how the policy writes calls of tools.
        clock: the trajectory's time.
        rewards: terms that the agent has posted.
        failure: the first one; no further call is answered then.
    """

    conversations: Conversations
    parse: Parse
    clock: EpisodeClock
    replies: Replies = field(default_factory=Replies)
    rewards: dict[str, float] = field(default_factory=dict)
    failure: EpisodeError | None = None

    async def chat(self, messages: list[dict[str, Any]], tools: list[Any], wanted: Wanted) -> tuple[dict[str, Any], Reply]:
        """Answer a chat with a message."""
        with reading():
            readings = [self.replies.restore(message) for message in messages]
        restored = [likeliest for likeliest, *_ in readings]
        alike = {place: others for place, (_, *others) in enumerate(readings) if others}
        reply = await self.conversations.chat(
            restored, tools, alike=alike, max_new_tokens=wanted.max_new_tokens, stop=wanted.stop
        )
        shown = before_stop(reply.text, wanted.stop)
        turn = replace(self.parse(reply.text), text=self.parse(shown).text) if tools else ParsedTurn(shown)
        if any(isinstance(call, str) for call in turn.calls):
            self.conversations.counts["malformed_calls"] += 1
        message = reply_message(turn, shown)
        self.replies.remember(message, reply.text)
        return message, reply

    def token_text(self, token_id: int) -> str:
        """Text of one token."""
        return self.conversations.tokenizer.decode([token_id], keep_special=True)


class Gateway:
    """Serves the sessions that are open."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self.url = ""

    async def start(self) -> None:
        """Listen on a free port of this machine's loopback; nothing if it does already."""
        async with self._starting:  # many trajectories begin at once
            if self._runner is None:
                self._runner = await self._listen()
                self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _listen(self) -> web.AppRunner:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.post("/v1/messages", self._message),
                web.post("/v1/reward", self._reward),
                web.get("/v1/models", self._models),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_SECONDS)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def close(self) -> None:
        """Listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def open(self, session: Session) -> Iterator[str]:
        """Answer a trajectory's calls meanwhile; yields its key."""
        key = f"laminar-{secrets.token_hex(16)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session, body: Mapping[str, Any]) -> web.StreamResponse:
            with reading():
                wanted, messages, tools = read_wanted(body), read_messages(body), read_tools(body)
            message, reply = await session.chat(messages, tools, wanted)
            response = chat_response(message, reply, wanted, session.token_text)
            if not wanted.stream:
                return _json(response)
            return await _stream(
                request, [f"data: {json.dumps(chunk)}\n\n" for chunk in chat_chunks(response)], "data: [DONE]\n\n"
            )

        return await self._answer(request, answer)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session, body: Mapping[str, Any]) -> web.StreamResponse:
            with reading():
                wanted, prompt = read_wanted(body), body.get("prompt")
            if not isinstance(prompt, str):
                raise BadCallError(f"prompt is {prompt!r:.80}; give one text")
            calls = session.conversations
            reply = await calls.complete(prompt, max_new_tokens=wanted.max_new_tokens, stop=wanted.stop)
            response = completion_response(reply, wanted, session.token_text)
            if not wanted.stream:
                return _json(response)
            return await _stream(request, [f"data: {json.dumps(response)}\n\n"], "data: [DONE]\n\n")

        return await self._answer(request, answer)

    async def _message(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session, body: Mapping[str, Any]) -> web.StreamResponse:
            with reading():
                messages, tools, wanted = read_message_request(body)
            message, reply = await session.chat(messages, tools, wanted)
            response = message_response(message, reply, wanted)
            if not wanted.stream:
                return _json(response)
            events = [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in message_events(response)]
            return await _stream(request, events, "")

        return await self._answer(request, answer)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        async def answer(session: Session, body: Mapping[str, Any]) -> web.StreamResponse:
            terms = body.get("terms") or {"agent": body.get("reward")}
            if not isinstance(terms, dict):
                raise BadCallError('give {"reward": number} or {"terms": {name: number}}')
            try:
                session.rewards |= {name: finite_number(value, f"reward {name!r}") for name, value in terms.items()}
            except EpisodeError as error:
                raise BadCallError(str(error)) from error
            return web.json_response({"rewards": session.rewards})

        return await self._answer(request, answer)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "laminar"}
        return web.json_response({"object": "list", "data": [model]})

    async def _answer(self, request: web.Request, answer: Callable[[Session, Mapping[str, Any]], Any]) -> web.StreamResponse:
        """Find the session, and turn what goes wrong into an error that no client tries again.

        The key may also stand as the model's name, for callers that share one client among trajectories.
        """
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        try:
            body = msgspec.json.decode(await request.read())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, f"the body is no JSON: {error}", "invalid_request_error")
        if not isinstance(body, dict):
            return _error(400, "the body must be a JSON object", "invalid_request_error")
        session = self._sessions.get(key) or self._sessions.get(str(body.get("model")))
        if session is None:
            return _error(401, "this key belongs to no running trajectory", "invalid_api_key")
        if session.failure is not None:
            return _error(400, f"this trajectory has failed: {session.failure}", "trajectory_failed")
        try:
            return await answer(session, body)
        except SpentError as error:
            return _error(400, str(error), "context_length_exceeded")
        except BadCallError as error:
            return _error(400, str(error), "invalid_request_error")
        except EpisodeError as error:
            session.failure = error
            return _error(400, str(error), "trajectory_failed")


async def _stream(request: web.Request, events: list[str], end: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(("".join(events) + end).encode())
    await response.write_eof()
    return response


def _json(value: Mapping[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, text: str, code: str) -> web.Response:
    return web.json_response({"type": "error", "error": {"message": text, "type": code, "code": code}}, status=status)
