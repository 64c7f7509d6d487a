"""An engine without a model and a tokenizer without a vocabulary, to try environments and rewards in a test.

Both are deterministic and need neither torch nor files. One character is one token: its code point.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from laminar.errors import EngineError
from laminar.types import FinishReason, Int32Array, Message, SamplingParameters, WeightVersion, sampled
from rollout.generation import Generation, OnSegment
from rollout.tokens import ChatMessage, chat_message

VERSION = WeightVersion(0, 0)


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine was asked."""

    input_ids: tuple[int, ...]
    sampling: SamplingParameters
    request_id: str


class ScriptedEngine:
    """Gives back what it was told to, request by request, and remembers the requests.

    A text is cut at the budget, with log-prob -1 a token; a `Generation` is given back as it is; an error is raised.
    """

    def __init__(self, script: Iterable[str | Generation | Exception]) -> None:
        self._script = list(script)
        self.requests: list[Request] = []

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: SamplingParameters,
        request_id: str,
        on_segment: OnSegment | None = None,
    ) -> Generation:
        """The next answer.

        Raises:
            EngineError: the script is at its end.
        """
        self.requests.append(Request(tuple(input_ids.tolist()), sampling, request_id))
        if not self._script:
            raise EngineError("the script has no further answer")
        answer = self._script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        generation = answer if isinstance(answer, Generation) else _generation(answer, sampling.max_new_tokens)
        if on_segment is not None:
            for segment in generation.segments:
                on_segment(segment)
        return generation


class CodePointTokenizer:
    """One token a character."""

    def encode(self, content: str | tuple[Message, ...]) -> Int32Array:
        """(T,) int32: the text, or the messages one a line."""
        if isinstance(content, str):
            return self.encode_observation(content)
        return self.encode_observation(self.render([chat_message(message) for message in content]))

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The tools' names, then the messages, one a line, and `assistant: ` for the policy to go on from."""
        names = f"tools: {', '.join(tool['function']['name'] for tool in tools)}\n" if tools else ""
        return names + "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "

    def encode_observation(self, text: str) -> Int32Array:
        """(T,) int32."""
        return np.asarray([ord(character) for character in text], dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | Int32Array, *, keep_special: bool = False) -> str:
        """The text; there are no special tokens."""
        return "".join(chr(token_id) for token_id in token_ids)


def _generation(text: str, budget: int) -> Generation:
    ids = [ord(character) for character in text][:budget]
    reason = FinishReason.LENGTH if len(text) > budget else FinishReason.STOP
    return Generation((sampled(ids, [-1.0] * len(ids), VERSION),) if ids else (), reason)
