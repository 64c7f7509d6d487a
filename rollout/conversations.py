"""What an agent's calls come to as tokens: every call continues a line that has the same history, or begins a new one.

An agent sends whole histories. A history that a line has already, reply included, is continued by what is new, so that
sampled ids stay (case D09). Any other, be it branched, shortened or rewritten, begins a line of its own, whose history is
given text and never trained. So every sampled token is trained once, in the context in which it was sampled.

Calls are answered one after the other, so that budgets hold and noise repeats; each line has noise of its own.
It does not know HTTP, agents or rewards.
"""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from laminar.errors import ConfigError
from laminar.types import Chain, FailureKind, FinishReason, Int32Array, SamplingParameters, Turn
from rollout.boundary import EpisodeError
from rollout.dialogue import Dialogue, Fit
from rollout.generation import Generator
from rollout.showing import COUNTED
from rollout.tokens import ChatMessage, Tokenizer
from rollout.transcript import Transcript
from rollout.turn import TurnSampler

_NOTHING_ALIKE: Mapping[int, Sequence[ChatMessage]] = MappingProxyType({})


class BadCallError(Exception):
    """A call that cannot be answered as it is; the text is for the agent."""


class SpentError(Exception):
    """A budget of the trajectory is used up."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled turn.

    Attributes:
        text: without end marker.
        finish_reason: why it ended.
        token_ids: (T,) int32, as sampled.
        logprobs: one for each id.
        num_prompt_tokens: tokens of the context.
    """

    text: str
    finish_reason: FinishReason
    token_ids: Int32Array
    logprobs: tuple[float, ...]
    num_prompt_tokens: int


@dataclass(slots=True)
class _Line:
    """One append-only conversation; `history` is what an agent must send to continue it, None if it cannot be.

    `answered` is the number of the call that it answered last.
    """

    transcript: Transcript = field(default_factory=Transcript)
    dialogue: Dialogue | None = None
    history: tuple[str, ...] | None = None
    answered: int = 0


@dataclass(slots=True)
class Conversations:
    """All calls of one trajectory.

    Attributes:
        engine, tokenizer: what draws tokens, and what makes text of them.
        sampling: how tokens are drawn; `max_new_tokens` is the budget of all calls together.
        max_turns, max_tokens: budgets of the trajectory; None: not limited.
        strict: a chat template that drifts or rewrites is refused.
        counts: how often something noteworthy happened.
        texts: of all turns, in their order.
        spent: the budget that had no room for the last call; None if that was answered.
    """

    engine: Generator
    tokenizer: Tokenizer
    sampling: SamplingParameters
    max_turns: int | None = None
    max_tokens: int | None = None
    strict: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    spent: FinishReason | None = None
    _lines: list[_Line] = field(default_factory=list)
    _order: list[tuple[int, int]] = field(default_factory=list)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        alike: Mapping[int, Sequence[ChatMessage]] = _NOTHING_ALIKE,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Answer a chat.

        Args:
            messages: the whole history.
            tools: what the policy may call.
            alike: what else the message at a place may stand for; a history that a line has decides.
            max_new_tokens: most tokens of this reply; None: what the budget has left.
            stop: texts that end it, beside the run's own.

        Raises:
            BadCallError: the template refuses the messages.
            SpentError: a budget is used up.
            EpisodeError: the engine failed, or the template did what `strict` forbids.
        """
        async with self._turn:
            return await self._chat(messages, tools, alike, max_new_tokens, stop)

    async def _chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        alike: Mapping[int, Sequence[ChatMessage]],
        max_new_tokens: int | None,
        stop: Sequence[str],
    ) -> Reply:
        others = [set(map(_message_key, alike.get(place, ()))) for place in range(len(messages))]
        history = (_key({"tools": list(tools)}), *map(_message_key, messages))
        line, begun = self._find(history, [set(), *others])
        known, history = len(begun), begun + history[len(begun) :]
        dialogue, transcript, counts = copy.copy(line.dialogue), line.transcript.copy(), self.counts.copy()
        try:
            reply = await self._answer(line, messages, tools, known, max_new_tokens, stop)
        except (BadCallError, SpentError):  # nothing was shown; another call may go on there
            line.history, line.dialogue, self.counts = history[:known] or None, dialogue, counts
            raise
        except asyncio.CancelledError:  # the agent gave up on it, and may ask the same again
            line.history, line.dialogue, self.counts = history[:known] or None, dialogue, counts
            self._take_back(line, transcript)
            raise
        line.history = (*history, _message_key({"role": "assistant", "content": reply.text}))
        return reply

    async def _answer(
        self,
        line: _Line,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        known: int,
        max_new_tokens: int | None,
        stop: Sequence[str],
    ) -> Reply:
        """Sample a turn of a chat, of whose history the line has `known` keys."""
        try:
            if line.dialogue is None:
                line.dialogue = Dialogue(self.tokenizer, messages, tools)
                new, in_new_chain = line.dialogue.first_token_ids(), False
            else:
                shown = line.dialogue.go_on(line.transcript.turn_token_ids(), list(messages)[known - 1 :])
                new, in_new_chain = shown.token_ids, shown.fit is Fit.REWRITTEN
                self._note(shown.fit)
        except ConfigError as error:
            raise BadCallError(str(error)) from error
        return await self._sample(line, new, in_new_chain, max_new_tokens, stop)

    async def complete(self, prompt: str, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Reply:
        """Continue raw text. Raises as `chat`."""
        async with self._turn:
            return await self._complete(prompt, max_new_tokens, stop)

    async def _complete(self, prompt: str, max_new_tokens: int | None, stop: Sequence[str]) -> Reply:
        line, known = self._find_text(prompt)
        new = self.tokenizer.encode_observation(prompt[len(known) :]) if known else self.tokenizer.encode(prompt)
        if not line.transcript.num_tokens and not len(new):
            raise BadCallError("the prompt is empty; the policy needs a token to go on from")
        line.history, transcript = None, line.transcript.copy()
        try:
            reply = await self._sample(line, new, False, max_new_tokens, stop)
        except SpentError:
            line.history = (known,) if known else None
            raise
        except asyncio.CancelledError:
            line.history = (known,) if known else None
            self._take_back(line, transcript)
            raise
        line.history = (prompt + reply.text,) if reply.text else None  # behind an end mark alone nobody goes on
        return reply

    def chains(self) -> tuple[Chain, ...]:
        """All chains, those of one line together."""
        return tuple(chain for line in self._lines for chain in line.transcript.chains())

    def turns(self) -> tuple[Turn, ...]:
        """All turns in the order in which they ended, with their place in `chains`."""
        first, firsts = 0, []
        for line in self._lines:
            firsts.append(first)
            first += len(line.transcript.chains())
        turns = [(firsts[line], self._lines[line].transcript.turns[turn]) for line, turn in self._order]
        return tuple(replace(turn, chain=first + turn.chain) for first, turn in turns)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy drew."""
        return sum(line.transcript.num_sampled_tokens for line in self._lines)

    def _find(self, history: tuple[str, ...], others: Sequence[Set[str]]) -> tuple[_Line, tuple[str, ...]]:
        """The line with the longest part of this history, and that part as the line has it; a new line if there is none.

        Of two that are as long the agent goes on with the reply that it got last.
        """
        readings = [{key} | other for key, other in zip(history, others, strict=True)]
        begun = [(line, line.history) for line in self._lines if line.history and _begins(line.history, readings)]
        if not begun:
            return self._add_line(), ()
        line, part = max(begun, key=lambda each: (len(each[1]), each[0].answered))
        line.history = None
        return line, part

    def _find_text(self, prompt: str) -> tuple[_Line, str]:
        """The line with the longest beginning of this text, and that; a new line if none has one and something is new."""
        texts = [(line, line.history[0]) for line in self._lines if line.dialogue is None and line.history]
        begun = [(line, text) for line, text in texts if prompt.startswith(text) and (prompt != text or _is_cut(line))]
        return max(begun, key=lambda each: (len(each[1]), each[0].answered)) if begun else (self._add_line(), "")

    def _add_line(self) -> _Line:
        if self._lines:
            self.counts["branched_contexts"] += 1
        self._lines.append(_Line())
        return self._lines[-1]

    def _take_back(self, line: _Line, transcript: Transcript) -> None:
        """Make nothing of a call that nobody waits for any more: its line is as before it, or gone if it began with it."""
        line.transcript = transcript
        if not transcript.num_tokens and line is self._lines[-1]:
            self._lines.pop()
            if self._lines:
                self.counts -= Counter(branched_contexts=1)

    def _note(self, fit: Fit) -> None:
        if fit is not Fit.APPENDED:
            self.counts[COUNTED[fit]] += 1
            if self.strict:
                text = f"the chat template has {fit} what was sampled, and environment.strict_template is true"
                raise EpisodeError(FailureKind.ENVIRONMENT, text)

    async def _sample(
        self, line: _Line, new: Int32Array, in_new_chain: bool, max_new_tokens: int | None, stop: Sequence[str]
    ) -> Reply:
        room = self._room(len(new), max_new_tokens)
        transcript = line.transcript
        if in_new_chain:
            transcript.begin_chain()
        transcript.add_given(new)
        num_prompt_tokens = len(transcript.token_ids())
        sampling = replace(
            self.sampling,
            seed=(self.sampling.seed + self._lines.index(line)) % 2**63,
            max_new_tokens=transcript.num_sampled_tokens + room,
            stop=(*self.sampling.stop, *stop),
        )
        reason = await TurnSampler(self.engine, self.tokenizer, sampling).sample(transcript)
        ids = transcript.turn_token_ids()
        logprobs = tuple(x for s in transcript.turn_segments() if s.logprobs is not None for x in s.logprobs.tolist())
        transcript.end_turn(reason)
        self._order.append((self._lines.index(line), len(transcript.turns) - 1))
        line.answered = len(self._order)
        self.texts.append(self.tokenizer.decode(ids))
        return Reply(self.texts[-1], reason, ids, logprobs, num_prompt_tokens)

    def _room(self, num_new: int, wanted: int | None) -> int:
        """Tokens that this call may sample.

        Raises:
            SpentError: none.
        """
        room = self.sampling.max_new_tokens - self.num_sampled_tokens
        if self.max_tokens is not None:
            room = min(room, self.max_tokens - num_new - sum(line.transcript.num_tokens for line in self._lines))
        out_of_turns = self.max_turns is not None and len(self._order) >= self.max_turns
        self.spent = FinishReason.MAX_TURNS if out_of_turns else FinishReason.MAX_TOKENS if room < 1 else None
        if self.spent is not None:  # a shorter call may still fit
            raise SpentError(f"the trajectory's budget is used up ({self.spent})")
        return room if wanted is None else min(room, wanted)


def _is_cut(line: _Line) -> bool:
    """Whether its last reply ended at a limit, so that it goes on without anything new."""
    return line.transcript.turns[-1].finish_reason is FinishReason.LENGTH


def _begins(known: tuple[str, ...], readings: Sequence[Set[str]]) -> bool:
    """Whether a line's history is the beginning of one whose messages may each be read in several ways."""
    return len(known) <= len(readings) and all(key in reading for key, reading in zip(known, readings, strict=False))


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _message_key(message: ChatMessage) -> str:
    """What counts for a message to be the same as before; of a reply the text, and calls that are not in it."""
    if message["role"] == "assistant":
        return _key({"text": message["content"], "calls": message.get("tool_calls") or []})
    return _key(dict(message))
