"""One sampled turn: ask the engine, and after an abort ask again with what is there and the budget that is left.

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
from rollout.tokens import Tokenizer
from rollout.transcript import Transcript

_MAX_FRUITLESS_ABORTS = 6
"""Aborts in a row without a new token before the engine is given up."""
_RESUME_DELAY_SECONDS = 0.01
"""Pause before resuming after a fruitless abort; doubles each time, so that an engine being swapped is not flooded."""


@dataclass(frozen=True, slots=True)
class TurnSampler:
    """Samples turns into a transcript. `sampling.max_new_tokens` is the budget of all turns together."""

    engine: Generator
    tokenizer: Tokenizer
    sampling: SamplingParameters

    async def sample(self, transcript: Transcript) -> FinishReason:
        """Append one turn to a transcript that ends with what the policy must answer.

        Raises:
            EpisodeError: the engine failed, broke its contract, or aborted without end.
        """
        fruitless = 0
        while True:
            budget = self.sampling.max_new_tokens - transcript.num_sampled_tokens
            generation = await self._request(transcript, budget)
            transcript.add_sampled(generation.segments)
            if transcript.cut_at_stop(self.sampling.stop, lambda ids: self.tokenizer.decode(ids, keep_special=True)):
                return FinishReason.STOP
            if generation.finish_reason is not FinishReason.ABORT:
                return generation.finish_reason
            if generation.num_tokens == budget:  # aborted on the very last token
                return FinishReason.LENGTH
            fruitless = 0 if generation.num_tokens else fruitless + 1
            if fruitless > _MAX_FRUITLESS_ABORTS:
                raise EpisodeError(FailureKind.ENGINE, f"the engine aborted {fruitless} times in a row without a new token")
            if fruitless:
                await asyncio.sleep(_RESUME_DELAY_SECONDS * 2 ** (fruitless - 1))

    async def _request(self, transcript: Transcript, budget: int) -> Generation:
        request_id = uuid.uuid4().hex  # names only, noise hangs on the seed; of one length, since engines abort by prefix
        try:
            generation = await self.engine.generate(
                transcript.token_ids(), replace(self.sampling, max_new_tokens=budget), request_id
            )
        except (EngineError, DeadlineError) as error:
            raise EpisodeError(FailureKind.ENGINE, f"the engine failed: {error}") from error
        if generation.num_tokens > budget:
            raise EpisodeError(
                FailureKind.ENGINE, f"the engine drew {generation.num_tokens} tokens where {budget} were asked for"
            )
        if generation.num_tokens == 0 and generation.finish_reason is not FinishReason.ABORT:
            raise EpisodeError(FailureKind.ENGINE, f"the engine ended ({generation.finish_reason}) without drawing a token")
        return generation
