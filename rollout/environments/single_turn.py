"""Environment `single_turn`: the prompt is shown, one answer ends the episode, the rewards judge it."""

from laminar.types import Prompt
from rollout.environments.base import Observation, StepResult


class SingleTurn:
    """One question, one answer."""

    resumable = True

    async def reset(self, prompt: Prompt) -> Observation:
        """The prompt itself."""
        return Observation(prompt.content)

    async def step(self, completion: str) -> StepResult:
        """Done, whatever was answered."""
        return StepResult(done=True)

    async def close(self) -> None:
        """Nothing is held."""
