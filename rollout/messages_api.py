"""Anthropic's messages format: requests become OpenAI's messages, replies become blocks and events.

Pure: no I/O. It does not know how replies are sampled.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from laminar.types import FinishReason
from rollout.chat_api import MODEL, Wanted, checked_limit, checked_stop, read_tools, text_of
from rollout.conversations import BadCallError, Reply


def read_message_request(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Wanted]:
    """Messages, tools and settings in OpenAI's format; to be called under `reading`.

    Raises:
        BadCallError: not text, or no limits.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadCallError("messages must be a list that is not empty")
    system = text_of(body.get("system"))
    read: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        read += _assistant(message) if message["role"] == "assistant" else _user(message)
    tools = [
        {
            "type": "function",
            "function": {"name": t["name"], "description": t.get("description", ""), "parameters": t["input_schema"]},
        }
        for t in read_tools(body)
    ]
    limit = checked_limit(body.get("max_tokens"))
    stop = checked_stop(body.get("stop_sequences") or [], "stop_sequences")
    return read, tools, Wanted(limit, stop, bool(body.get("stream")), False)


def message_response(message: Mapping[str, Any], reply: Reply, wanted: Wanted) -> dict[str, Any]:
    """Body of a whole reply."""
    blocks: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        )
    stopped_by = next((text for text in wanted.stop if text in reply.text), None)
    reason = "max_tokens" if reply.finish_reason is FinishReason.LENGTH else "stop_sequence" if stopped_by else "end_turn"
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": blocks,
        "stop_reason": "tool_use" if message.get("tool_calls") else reason,
        "stop_sequence": stopped_by,
        "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": len(reply.token_ids)},
    }


def message_events(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same as the events of a stream."""
    start = {**response, "content": [], "stop_reason": None, "stop_sequence": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(response["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    end = {"stop_reason": response["stop_reason"], "stop_sequence": response["stop_sequence"]}
    return [*events, {"type": "message_delta", "delta": end, "usage": response["usage"]}, {"type": "message_stop"}]


def _assistant(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    texts, calls = [], []
    for block in _blocks(message):
        if block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": block["id"], "type": "function", "function": function})
        else:
            texts.append(text_of([block]))
    plain: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return [{**plain, "tool_calls": calls} if calls else plain]


def _user(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools' results become messages of their own, before what the user says."""
    results, texts = [], []
    for block in _blocks(message):
        if block["type"] == "tool_result":
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text_of(block.get("content"))})
        else:
            texts.append(text_of([block]))
    return [*results, {"role": "user", "content": "".join(texts)}] if texts else results


def _blocks(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
