"""Show an episode's observations to the policy: raw text is appended, messages go through the chat template.

Invariants: a trajectory never grows beyond its token budget by what it is shown; a template that drifts or rewrites is
counted, or refused if the config is strict. It does not know environments' methods, engines or rewards.
"""

from collections import Counter
from dataclasses import dataclass, field

from laminar.errors import ConfigError
from laminar.types import FailureKind, Int32Array
from rollout.boundary import EpisodeError
from rollout.dialogue import Dialogue, Fit
from rollout.environments.base import Observation
from rollout.tokens import Tokenizer, chat_message
from rollout.transcript import Transcript

COUNTED = {Fit.DRIFTED: "drifted_turns", Fit.REWRITTEN: "rewritten_contexts"}
"""Names in `Trajectory.counts`."""


@dataclass(slots=True)
class Showing:
    """What one episode has been shown.

    Attributes:
        tokenizer: makes ids of text.
        transcript: what is shown is appended to it.
        max_tokens: most tokens of the trajectory; None if they are not limited.
        strict: a template that drifts or rewrites ends the episode as a failure.
        counts: how often it did.
    """

    tokenizer: Tokenizer
    transcript: Transcript
    max_tokens: int | None = None
    strict: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    dialogue: Dialogue | None = None

    def begin(self, observation: Observation) -> None:
        """Show the first observation.

        Raises:
            EpisodeError: it cannot be encoded, is empty, or leaves no room for an answer.
        """
        try:
            token_ids = self._first_token_ids(observation)
        except ConfigError as error:
            raise EpisodeError(FailureKind.ENVIRONMENT, f"the first observation cannot be encoded: {error}") from error
        if not len(token_ids):
            raise EpisodeError(
                FailureKind.ENVIRONMENT, "the first observation is empty; the policy needs a token to go on from"
            )
        if self.max_tokens is not None and len(token_ids) >= self.max_tokens:
            raise EpisodeError(
                FailureKind.ENVIRONMENT,
                f"the first observation has {len(token_ids)} tokens, "
                f"environment.max_trajectory_tokens allows {self.max_tokens}; raise it",
            )
        self.transcript.add_given(token_ids)

    def go_on(self, observation: Observation) -> bool:
        """Show a later observation; False if it leaves no room for an answer (then nothing is shown).

        Raises:
            EpisodeError: messages where raw text is needed, or a strict template that drifts.
        """
        if self.dialogue is None:
            if not isinstance(observation.content, str):
                text = "environment step gave chat messages in an episode that began with raw text; begin with messages"
                raise EpisodeError(FailureKind.USER_BUG, text)
            return self._append(self.tokenizer.encode_observation(observation.content))
        content = observation.content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else [*map(chat_message, content)]
        try:
            continuation = self.dialogue.go_on(self.transcript.turn_token_ids(), messages)
        except ConfigError as error:
            raise EpisodeError(FailureKind.ENVIRONMENT, str(error)) from error
        self._note(continuation.fit)
        return self._append(continuation.token_ids, in_new_chain=continuation.fit is Fit.REWRITTEN)

    def _first_token_ids(self, observation: Observation) -> Int32Array:
        if isinstance(observation.content, str):
            return self.tokenizer.encode(observation.content)
        self.dialogue = Dialogue(self.tokenizer, [*map(chat_message, observation.content)], observation.tools)
        return self.dialogue.first_token_ids()

    def _append(self, token_ids: Int32Array, *, in_new_chain: bool = False) -> bool:
        if self.max_tokens is not None and self.transcript.num_tokens + len(token_ids) >= self.max_tokens:
            return False
        if in_new_chain:
            self.transcript.begin_chain()
        self.transcript.add_given(token_ids)
        return True

    def _note(self, fit: Fit) -> None:
        if fit is Fit.APPENDED:
            return
        self.counts[COUNTED[fit]] += 1
        if self.strict:
            raise EpisodeError(
                FailureKind.ENVIRONMENT,
                f"the chat template has {fit} what was sampled, and environment.strict_template is true; mend the template, "
                "or set it to false to have such turns counted",
            )
