"""One sampled turn: ask the engine, and after an abort, or its death, ask again with what is there and the budget left.

A request is stateless (tokens in, tokens out), so resuming is the same call with a longer input.
This module knows neither the environment nor the wall clock.
"""

import asyncio
import uuid
from dataclasses import dataclass, replace

from laminar.errors import DeadlineError, EngineError
from laminar.types import FailureKind, FinishReason, SamplingParameters
from rollout.boundary import EpisodeError
from rollout.generation import Generation, Generator
from rollout.journal import Journal
from rollout.tokens import Tokenizer
from rollout.transcript import Transcript

_MAX_FRUITLESS_ABORTS = 12
"""Aborts in a row without a new token before the engine is given up: six seconds, in which a fleet that loses engine after
engine finds one that lives."""
_RESUME_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.01, 1.0
"""Pause before resuming after a fruitless abort; doubles each time, so that an engine being swapped is not flooded."""


@dataclass(frozen=True, slots=True)
class TurnSampler:
    """Samples turns into a transcript.

    Attributes:
        engine, tokenizer: what draws tokens, and what makes text of them.
        sampling: how tokens are drawn; `max_new_tokens` is the budget of all turns together.
        journal: hears of what is sampled.
        max_tokens: most tokens of the whole transcript, given ones included; None if they are not limited.
    """

    engine: Generator
    tokenizer: Tokenizer
    sampling: SamplingParameters
    journal: Journal | None = None
    max_tokens: int | None = None

    def budget(self, transcript: Transcript) -> int:
        """Tokens that may still be sampled."""
        budget = self.sampling.max_new_tokens - transcript.num_sampled_tokens
        return budget if self.max_tokens is None else min(budget, self.max_tokens - transcript.num_tokens)

    async def sample(self, transcript: Transcript) -> FinishReason:
        """Append one turn to a transcript that ends with what the policy must answer.

        Raises:
            EpisodeError: the engine failed, broke its contract, or aborted without end.
        """
        reason = self._resume(transcript)
        fruitless, trouble = 0, ""
        while reason is None:
            try:
                generation = await self._request(transcript, self.budget(transcript))
            except EngineError as error:
                if self.journal is None or not transcript.num_sampled_tokens:
                    raise EpisodeError(FailureKind.ENGINE, f"the engine failed: {error}") from error
                generation, trouble = Generation((), FinishReason.ABORT), f": {error}"  # what is there stays
            transcript.add_sampled(generation.segments)
            reason = self._ended(transcript, generation.finish_reason)
            if self.journal:
                self.journal.end_request(transcript.turn_segments(), reason)
            fruitless = 0 if generation.num_tokens else fruitless + 1
            if fruitless > _MAX_FRUITLESS_ABORTS:
                text = f"the engine aborted {fruitless} times in a row without a new token{trouble}"
                raise EpisodeError(FailureKind.ENGINE, text)
            if fruitless:
                await asyncio.sleep(min(_RESUME_DELAY_SECONDS * 2 ** (fruitless - 1), _LONGEST_DELAY_SECONDS))
        return reason

    def _resume(self, transcript: Transcript) -> FinishReason | None:
        """Begin with what an earlier owner has left of the turn; why it ended, if it had."""
        if self.journal is None:
            return None
        left = self.journal.begin_turn(transcript.token_ids())
        transcript.add_sampled(left.segments)
        return self._ended(transcript, left.finish_reason or FinishReason.ABORT) if left.segments else None

    def _ended(self, transcript: Transcript, reason: FinishReason) -> FinishReason | None:
        """Why the open turn is over; None if it goes on."""
        if transcript.cut_at_stop(self.sampling.stop, lambda ids: self.tokenizer.decode(ids, keep_special=True)):
            return FinishReason.STOP
        if reason is not FinishReason.ABORT:
            return reason
        is_spent = self.budget(transcript) <= 0  # aborted on the very last token
        return FinishReason.LENGTH if is_spent else None

    async def _request(self, transcript: Transcript, budget: int) -> Generation:
        request_id = uuid.uuid4().hex  # names only, noise hangs on the seed; of one length, since engines abort by prefix
        sampling = replace(self.sampling, max_new_tokens=budget)
        try:
            if self.journal and budget > self.journal.batch_tokens:  # a shorter answer is not worth a stream
                generation = await self.engine.generate(transcript.token_ids(), sampling, request_id, self.journal.note)
            else:
                generation = await self.engine.generate(transcript.token_ids(), sampling, request_id)
        except DeadlineError as error:
            raise EpisodeError(FailureKind.ENGINE, f"the engine failed: {error}") from error
        if generation.num_tokens > budget:
            raise EpisodeError(
                FailureKind.ENGINE, f"the engine drew {generation.num_tokens} tokens where {budget} were asked for"
            )
        if generation.num_tokens == 0 and generation.finish_reason is not FinishReason.ABORT:
            raise EpisodeError(FailureKind.ENGINE, f"the engine ended ({generation.finish_reason}) without drawing a token")
        return generation
