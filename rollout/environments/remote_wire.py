"""What goes over the wire between environment `remote` and its server (`rollout.environments.serve`).

One POST each, JSON both ways; `id` names the episode, `number` the call: 0 for the reset, then 1, 2, 3, ...

    /reset {"id", "number": 0, "prompt": {"prompt_id", "content", "fields"}}  -> {"observation"}
    /step  {"id", "number", "completion"}      -> {"done", "observation", "reward_terms", "counts"}
    /close {"id"}                              -> {}

`content` is text, or messages `{"role", "content"}`; an observation is `{"content", "tools"}`, or null when done. A call
that was answered is answered again in the same words, so any call may be repeated. What goes wrong is a status of 400 or
more with `{"error": {"kind", "text"}}`, kind as in `laminar.types.FailureKind`; an episode that is not known is status 404.
Pure: no I/O.
"""

from collections.abc import Mapping
from typing import Any

from laminar.errors import LaminarError
from laminar.types import FailureKind, Message, Prompt
from rollout.environments.base import Observation, StepResult

Body = dict[str, Any]


class WireError(LaminarError):
    """A body that is not of this form; the text is for the other side's author."""


def prompt_body(prompt: Prompt) -> Body:
    """A prompt as JSON values."""
    return {"prompt_id": prompt.prompt_id, "content": _content_body(prompt.content), "fields": prompt.fields}


def read_prompt(body: Any) -> Prompt:
    """A prompt.

    Raises:
        WireError: it is malformed.
    """
    fields = _table(body, "prompt")
    return Prompt(
        str(fields.get("prompt_id", "")), _read_content(fields.get("content")), _table(fields.get("fields", {}), "fields")
    )


def observation_body(observation: Observation) -> Body:
    """An observation as JSON values."""
    return {"content": _content_body(observation.content), "tools": list(observation.tools)}


def read_observation(body: Any) -> Observation:
    """An observation.

    Raises:
        WireError: it is malformed.
    """
    fields = _table(body, "observation")
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise WireError(f"tools {tools!r:.80} are no list of schemas")
    return Observation(_read_content(fields.get("content")), tuple(_table(tool, "tool") for tool in tools))


def step_body(result: StepResult) -> Body:
    """A step's result as JSON values."""
    shown = None if result.observation is None else observation_body(result.observation)
    terms, counts = dict(result.reward_terms), dict(result.counts)
    return {"done": result.done, "observation": shown, "reward_terms": terms, "counts": counts}


def read_step(body: Any) -> StepResult:
    """A step's result; its numbers are checked where the episode sums them.

    Raises:
        WireError: it is malformed.
    """
    fields = _table(body, "step")
    if not isinstance(fields.get("done"), bool):
        raise WireError(f"done is {fields.get('done')!r:.80}; it must be true or false")
    shown = fields.get("observation")
    return StepResult(
        done=fields["done"],
        observation=None if shown is None else read_observation(shown),
        reward_terms=_table(fields.get("reward_terms") or {}, "reward_terms"),
        counts=_table(fields.get("counts") or {}, "counts"),
    )


def error_body(kind: FailureKind, text: str) -> Body:
    """What went wrong, as JSON values."""
    return {"error": {"kind": kind.value, "text": text}}


def read_error(body: Any) -> tuple[FailureKind, str] | None:
    """Kind and text of what went wrong; None if the body does not say."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping) or error.get("kind") not in set(FailureKind):
        return None
    return FailureKind(error["kind"]), str(error.get("text", ""))


def _table(value: Any, name: str) -> Body:
    if not isinstance(value, dict):
        raise WireError(f"{name} is {value!r:.80}; it must be a table")
    return value


def _content_body(content: str | tuple[Message, ...]) -> str | list[Body]:
    return content if isinstance(content, str) else [{"role": m.role, "content": m.content} for m in content]


def _read_content(content: Any) -> str | tuple[Message, ...]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise WireError(f"content {content!r:.80} is neither text nor a list of messages")
    for message in content:
        if not all(isinstance(_table(message, "message").get(key), str) for key in ("role", "content")):
            raise WireError(f"message {message!r:.80} needs the texts `role` and `content`")
    return tuple(Message(message["role"], message["content"]) for message in content)
