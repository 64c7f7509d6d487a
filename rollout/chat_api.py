"""OpenAI's chat and completion formats: requests checked, replies written; and what an agent sends back is recognised.

Sampling settings are the run's, since the trainer must know them: `temperature`, `top_p`, penalties and seeds of a request
are read and left unused. Pure: no I/O. It does not know how replies are sampled.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from laminar.types import FinishReason
from rollout.conversations import BadCallError, Reply
from rollout.tokens import ChatMessage
from rollout.tools.calls import Call, ParsedTurn

MODEL = "policy"
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for, whatever the format."""

    max_new_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    logprobs: bool


@contextmanager
def reading() -> Iterator[None]:
    """Reading a request: whatever a malformed one makes go wrong becomes a `BadCallError`, which no client tries again."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise BadCallError(f"the request is malformed: {type(error).__name__}: {error}") from error


def read_wanted(body: Mapping[str, Any]) -> Wanted:
    """The settings that count.

    Raises:
        BadCallError: one that is not supported, or malformed.
    """
    if body.get("n") not in (None, 1):
        raise BadCallError(f"n is {body['n']!r}; ask once for each answer")
    if body.get("best_of") not in (None, 1) or body.get("echo"):
        raise BadCallError("best_of and echo are not supported; leave them out")
    limits = body.get("max_completion_tokens"), body.get("max_tokens")
    limit = checked_limit(next((limit for limit in limits if limit is not None), None))
    stop = body.get("stop") or []
    texts = checked_stop([stop] if isinstance(stop, str) else stop, "stop")
    return Wanted(limit, texts, bool(body.get("stream")), bool(body.get("logprobs")))


def checked_limit(limit: Any) -> int | None:
    """A request's `max_tokens`. Raises BadCallError if it is no limit."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise BadCallError(f"max_tokens is {limit!r:.80}; give a whole number of 1 or more")
    return limit


def checked_stop(texts: Any, name: str) -> tuple[str, ...]:
    """A request's stop texts. Raises BadCallError if they are no list of texts."""
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadCallError(f"{name} is {texts!r:.80}; give a list of texts that are not empty")
    return tuple(texts)


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The request's tools. Raises BadCallError if they are no list of objects."""
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadCallError(f"tools is {tools!r:.80}; give a list of objects")
    return tools


@dataclass(slots=True)
class Replies:
    """What an agent was told so far, to put the policy's own words in the place of what it sends back.

    Replies may be shown alike that are not: one of two was cut at a stop text, say. So every text is kept, the newest last.
    """

    _texts: dict[str, list[str]] = field(default_factory=dict)

    def remember(self, message: Mapping[str, Any], text: str) -> None:
        """Note that a message was made of this text."""
        texts = self._texts.setdefault(_told(message), [])
        if text in texts:
            texts.remove(text)
        texts.append(text)

    def restore(self, message: Mapping[str, Any]) -> list[ChatMessage]:
        """All that the message may stand for, as the chat template takes it; what was told last comes first."""
        if message["role"] != "assistant":
            return [message]
        if texts := self._texts.get(_told(message)):
            return [{"role": "assistant", "content": text} for text in reversed(texts)]
        calls = [_readable(call) for call in message.get("tool_calls") or ()]
        given = {"role": "assistant", "content": message.get("content") or ""}
        return [{**given, "tool_calls": calls} if calls else given]


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The request's messages with their contents as text.

    Raises:
        BadCallError: they are malformed, or hold what is not text.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadCallError("messages must be a list that is not empty")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadCallError(f"message {message!r:.80} has no role")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadCallError(f"tool_calls is {calls!r:.80}; give a list of objects")
    return [{**message, "content": text_of(message.get("content"))} for message in messages]


def text_of(content: Any) -> str:
    """Text of a content: itself, or its parts of type `text` together.

    Raises:
        BadCallError: it holds something else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        if wrong := next((part for part in content if not isinstance(part.get("text"), str)), None):
            raise BadCallError(f"content part {wrong!r:.80} has no text; give it one")
        return "".join(part["text"] for part in content)
    raise BadCallError(f"content {content!r:.80} is not text; the policy reads text only")


def reply_message(turn: ParsedTurn, text: str) -> dict[str, Any]:
    """The assistant's message; a turn with a malformed call is told as plain text, for the agent to answer."""
    calls = [call for call in turn.calls if isinstance(call, Call)]
    if not calls or len(calls) < len(turn.calls):
        return {"role": "assistant", "content": text}
    told = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": turn.text or None, "tool_calls": told}


def before_stop(text: str, stop: Sequence[str]) -> str:
    """A reply's text up to the stop text that ended it, as both protocols show it; the trajectory keeps all of it."""
    return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=None)]


def chat_response(message: Mapping[str, Any], reply: Reply, wanted: Wanted, decode: Callable[[int], str]) -> dict[str, Any]:
    """Body of a whole chat reply."""
    choice = {"index": 0, "message": message, "finish_reason": _finish(message, reply), "logprobs": None}
    if wanted.logprobs:
        choice["logprobs"] = {"content": _logprobs(reply, decode)}
    return {**_head("chat.completion"), "choices": [choice], "usage": usage(reply)}


def chat_chunks(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same as the events of a stream."""
    (choice,) = response["choices"]
    message = choice["message"]
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"] or ""}]
    deltas += [{"tool_calls": [call]} for call in calls]
    head = {**response, "object": "chat.completion.chunk"}
    head.pop("usage")

    def chunk(delta: Mapping[str, Any], finish: str | None, logprobs: Any = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]}

    first, *others = deltas
    last = {**chunk({}, choice["finish_reason"]), "usage": response["usage"]}
    return [chunk(first, None, choice["logprobs"]), *(chunk(delta, None) for delta in others), last]


def completion_response(reply: Reply, wanted: Wanted, decode: Callable[[int], str]) -> dict[str, Any]:
    """Body of a whole completion."""
    logprobs = None
    if wanted.logprobs:
        tokens = [decode(int(token_id)) for token_id in reply.token_ids]
        logprobs = {"tokens": tokens, "token_logprobs": list(reply.logprobs), "top_logprobs": None, "text_offset": []}
    text = before_stop(reply.text, wanted.stop)
    choice = {"index": 0, "text": text, "finish_reason": _FINISH.get(reply.finish_reason), "logprobs": logprobs}
    return {**_head("text_completion"), "choices": [choice], "usage": usage(reply)}


def usage(reply: Reply) -> dict[str, int]:
    """Tokens of a call."""
    drawn = len(reply.token_ids)
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": drawn,
        "total_tokens": reply.num_prompt_tokens + drawn,
    }


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"call-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL}


def _finish(message: Mapping[str, Any], reply: Reply) -> str:
    return "tool_calls" if message.get("tool_calls") else _FINISH.get(reply.finish_reason, "stop")


def _logprobs(reply: Reply, decode: Callable[[int], str]) -> list[dict[str, Any]]:
    return [
        {"token": decode(int(token_id)), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token_id, logprob in zip(reply.token_ids, reply.logprobs, strict=True)
    ]


def _told(message: Mapping[str, Any]) -> str:
    """What makes a message the one that the agent was told."""
    return json.dumps([message.get("content") or "", [_called(call) for call in message.get("tool_calls") or ()]])


def _called(call: Mapping[str, Any]) -> Any:
    """A call without what an agent's client may write otherwise: blanks, the order of keys, 1.0 as 1."""
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"], parse_int=float)
        return [call.get("id"), function["name"], json.dumps(arguments, sort_keys=True)]
    except (KeyError, TypeError, ValueError):
        return call


def _readable(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call that is not the policy's own; templates take its arguments as a table. Raises BadCallError if they are none."""
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadCallError(f"tool call {call!r:.80} is malformed: its arguments must be JSON text") from error
