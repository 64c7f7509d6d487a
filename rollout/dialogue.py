"""What a chat template adds to a running conversation, and whether what it adds fits behind what was sampled.

Before every turn the template renders the whole conversation; only the text behind the sampled turn is new, and only that
is encoded (case D09). So three things can happen:
- *appended*: the template writes the turn as it was sampled; the rest of its text follows it.
- *drifted*: it writes the turn with other blanks around it or another end marker. The sampled ids stay, the rest follows,
  and the turn is counted, since at inference the model will see slightly other ids.
- *rewritten*: it writes the turn or what came before in other words; templates that leave out earlier reasoning do. Then the
  policy must see the new text, so a new chain begins with all of it, given; the old one stays as it is. Counted as well.

Pure: no I/O, no clock. It does not know which template it is, nor what becomes of the ids.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laminar.types import Int32Array
from rollout.tokens import ChatMessage, Tokenizer

_MARK = "\u2983turn\u2984"
"""Stands in for a turn, to see what a template writes behind it. No template trims or splits at it."""


class Fit(enum.StrEnum):
    """How a template's text goes with what was sampled."""

    APPENDED = "appended"
    DRIFTED = "drifted"
    REWRITTEN = "rewritten"


@dataclass(frozen=True, slots=True)
class Continuation:
    """What is shown next: ids (T,) int32 behind the sampled turn, or of a new chain if `fit` is `REWRITTEN`."""

    fit: Fit
    token_ids: Int32Array


class Dialogue:
    """One conversation under one chat template."""

    def __init__(
        self, tokenizer: Tokenizer, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._messages, self._tools = list(messages), tuple(tools)
        self._shown = tokenizer.render(self._messages, self._tools)

    def first_token_ids(self) -> Int32Array:
        """(T,) int32: how the episode begins."""
        return self._tokenizer.encode_observation(self._shown)

    def go_on(self, turn: Int32Array, messages: Sequence[ChatMessage]) -> Continuation:
        """Show new messages behind a sampled turn.

        Args:
            turn: (T,) int32, all that was sampled since the last showing.
            messages: what is new.

        Raises:
            ConfigError: the template refuses the conversation.
        """
        content, end = self._split_end(turn)
        before = self._shown
        self._shown = shown = self._render(content, messages)
        fit, glue = self._compare(before, content, end, messages)
        self._messages = [*self._messages, _assistant(content), *messages]
        return Continuation(fit, self._tokenizer.encode_observation(shown if glue is None else glue))

    def _compare(self, before: str, content: str, end: str, messages: Sequence[ChatMessage]) -> tuple[Fit, str | None]:
        """How the new text fits, and the part of it behind the turn; None if there is no such part."""
        if self._shown.startswith(before + content + end):
            return Fit.APPENDED, self._shown[len(before + content + end) :]
        reasoning, closing, _ = content.rpartition("</think>")
        behind = self._render(reasoning + closing + _MARK, messages).rpartition(_MARK)[2]
        new = self._shown.removeprefix(before)
        if not (self._shown.startswith(before) and new.endswith(behind)):
            return Fit.REWRITTEN, None
        if _inked(new.removesuffix(behind)) != _inked(content):
            return Fit.REWRITTEN, None
        return Fit.DRIFTED, behind.removeprefix(end)

    def _render(self, content: str, messages: Sequence[ChatMessage]) -> str:
        return self._tokenizer.render([*self._messages, _assistant(content), *messages], self._tools)

    def _split_end(self, turn: Int32Array) -> tuple[str, str]:
        """The turn's text without its end marker, and the marker; a special token at the end is one."""
        marker = self._tokenizer.decode(turn[-1:], keep_special=True)
        if marker and not self._tokenizer.decode(turn[-1:]):
            return self._tokenizer.decode(turn[:-1], keep_special=True), marker
        return self._tokenizer.decode(turn, keep_special=True), ""


def _inked(text: str) -> str:
    return "".join(text.split())


def _assistant(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}
