"""Reward `judge`: a language model, or a reward model, behind an OpenAI-compatible URL says what an answer is worth.

Invariants: an answer is judged once, equal ones share a call, which ends when nobody waits for it any more; what cannot be
judged, be the judge out of reach, its verdict unreadable or the budget used up, is a failure of the verifier, never a wrong
answer.
"""

import asyncio
import os
import string
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import aiohttp
import regex  # type: ignore[import-untyped]
from pydantic import Field, field_validator

from laminar.config.addresses import HttpUrl
from laminar.config.section import Section
from laminar.types import FailureKind, Prompt
from rollout.boundary import EpisodeError
from rollout.rewards.base import RewardContext, missing_reference, reference_answer

_PLACES = {"question", "answer", "reference"}
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_FIRST_PAUSE_SECONDS = 0.5
_SCORE = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
_QUESTION = (
    "Judge the answer to a question.\n\nQuestion:\n{question}\n\nAnswer:\n{answer}\n\n"
    "Say in a sentence what is good or bad about it, then end with a line `Score: N`, N from 0 to 10."
)


@dataclass(slots=True)
class _Verdict:
    """A call, running or done, and how many answers wait for it."""

    task: asyncio.Task[float]
    num_waiting: int = 0

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class Judge:
    """Asks for a verdict and reads a number out of it."""

    class Options(Section):
        """Settings of `judge`."""

        url: HttpUrl
        """Base URL with the version, such as `http://judge:8000/v1`."""
        model: str
        """Name of the model there."""
        api_key_variable: str = ""
        """Environment variable with the key; empty: none is sent."""
        question: str = _QUESTION
        """What the judge is asked; `{question}`, `{answer}` and `{reference}` are filled in."""
        answer_field: str = "answer"
        """Data column for `{reference}`."""
        pattern: str = _SCORE
        """Finds the score in the verdict: its first group; the last match counts."""
        lowest: float = 0.0
        """Score that is worth 0; a verdict below it is unreadable."""
        highest: float = 10.0
        """Score that is worth 1; a verdict above it is unreadable."""
        max_verdict_tokens: int = Field(512, ge=1)
        """Longest verdict."""
        retries: int = Field(3, ge=0)
        """Further attempts after a broken connection, a busy or failing server; pauses double from half a second."""
        attempt_seconds: float = Field(60, gt=0)
        """Deadline of one attempt."""
        max_calls: int | None = Field(None, ge=1)
        """Budget of calls of one worker, retries included; unset: none."""
        max_running: int = Field(16, ge=1)
        """Answers that one worker has judged at once."""
        cache_size: int = Field(4096, ge=0)
        """Verdicts kept for equal questions."""

        @field_validator("question")
        @classmethod
        def _fills(cls, question: str) -> str:
            places = {name for _, name, _, _ in string.Formatter().parse(question) if name is not None}
            if "answer" not in places or not places <= _PLACES:
                raise ValueError(
                    f"must hold {{answer}}, and besides only {{question}} and {{reference}}; it has {sorted(places)}"
                )
            return question

        @field_validator("pattern")
        @classmethod
        def _compiles(cls, pattern: str) -> str:
            try:
                if regex.compile(pattern).groups < 1:
                    raise ValueError(f"{pattern!r} has no group that holds the score")
            except regex.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            return pattern

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pattern = regex.compile(options.pattern)
        self.max_running = options.max_running
        self._verdicts: OrderedDict[str, _Verdict] = OrderedDict()
        self.num_calls = 0

    def check_prompt(self, prompt: Prompt) -> str | None:
        """What keeps this prompt from being judged."""
        if "{reference}" not in self._options.question:
            return None
        return missing_reference(prompt, self._options.answer_field)

    async def score(self, context: RewardContext) -> float:
        """Between 0.0 and 1.0."""
        question = self._question(context)
        verdict = self._verdicts.get(question)
        if verdict is None or verdict.has_failed:
            verdict = self._verdicts[question] = _Verdict(asyncio.create_task(self._ask(question)))
        self._verdicts.move_to_end(question)
        verdict.num_waiting += 1
        try:
            return await asyncio.shield(verdict.task)  # it may be awaited by others too
        finally:
            verdict.num_waiting -= 1
            if not verdict.num_waiting and not verdict.task.done():  # or it would run beside those of `max_running`
                verdict.task.cancel()
                del self._verdicts[question]
            while len(self._verdicts) > self._options.cache_size and next(iter(self._verdicts.values())).task.done():
                self._verdicts.popitem(last=False)

    def _question(self, context: RewardContext) -> str:
        content, text = context.prompt.content, self._options.question
        asked = content if isinstance(content, str) else "\n".join(f"{m.role}: {m.content}" for m in content)
        reference = reference_answer(context.prompt, self._options.answer_field) if "{reference}" in text else ""
        return text.format(question=asked, answer=context.completion, reference=reference)

    async def _ask(self, question: str) -> float:
        for attempt in range(self._options.retries + 1):
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                return self._read(await self._call(question))
            except (aiohttp.ClientError, OSError, TimeoutError) as error:  # a TimeoutError is an OSError from 3.11 on
                trouble = f"{type(error).__name__}: {error}"
        raise EpisodeError(
            FailureKind.VERIFIER, f"judge {self._options.url} failed {attempt + 1} times; the last: {trouble}"
        )

    async def _call(self, question: str) -> str:
        options = self._options
        if options.max_calls is not None and self.num_calls >= options.max_calls:
            raise EpisodeError(
                FailureKind.VERIFIER, f"the judge's budget max_calls = {options.max_calls} is used up; raise it"
            )
        self.num_calls += 1
        body = {
            "model": options.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": options.max_verdict_tokens,
        }
        key = os.environ.get(options.api_key_variable, "") if options.api_key_variable else ""
        head = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=options.attempt_seconds)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{options.url.rstrip('/')}/chat/completions", json=body, headers=head) as response,
        ):
            if response.status in _RETRIED:
                raise OSError(f"status {response.status}: {(await response.text())[:200]}")
            if response.status != 200:
                text = (await response.text())[:200]
                raise EpisodeError(FailureKind.VERIFIER, f"judge {options.url} answered {response.status}: {text}")
            answer: Any = await response.json()
        return str(answer["choices"][0]["message"]["content"])

    def _read(self, verdict: str) -> float:
        options = self._options
        found = [match[1] for match in self._pattern.finditer(verdict, timeout=5)]
        try:
            score = float(found[-1])
        except (IndexError, TypeError, ValueError):
            score = float("nan")
        if not options.lowest <= score <= options.highest:
            raise EpisodeError(FailureKind.VERIFIER, f"the judge's verdict has no score in range: {verdict[-200:]!r}")
        return (score - options.lowest) / (options.highest - options.lowest)
