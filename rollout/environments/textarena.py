"""Environment `textarena`: a game of that package for one player. What the game says is shown, what it gives is the reward.

An invalid move is the game's to answer; an endless game ends by the episode's budgets.
"""

import asyncio
from typing import Any

from pydantic import Field

from laminar.config.section import Section
from laminar.errors import ConfigError
from laminar.types import Message, Prompt
from rollout.environments.base import Observation, StepResult


class TextArena:
    """One game. The prompt's text, if the data has more than a blank, is said before the game's rules."""

    gives_reward = True

    class Options(Section):
        """Settings of `textarena`."""

        game: str
        """Name in the package's registry, such as `GuessTheNumber-v0`."""
        settings: dict[str, Any] = Field(default_factory=dict)
        """Further arguments of the game."""
        seed_field: str = "seed"
        """Data column with the game's seed; without it every game is drawn anew."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._game: Any = None

    async def reset(self, prompt: Prompt) -> Observation:
        """The rules."""
        seed = prompt.fields.get(self._options.seed_field)
        self._game = await asyncio.to_thread(self._make, seed)
        said = self._news()
        if isinstance(prompt.content, str):
            return Observation((Message("user", f"{prompt.content}\n\n{said}".strip()),))
        return Observation((*prompt.content, Message("user", said)))

    async def step(self, completion: str) -> StepResult:
        """Play a move; the reward comes at the end."""
        done, _ = await asyncio.to_thread(self._game.step, completion)
        if not done:
            return StepResult(done=False, observation=Observation(self._news()))
        rewards, infos = await asyncio.to_thread(self._game.close)
        invalid = bool(infos and infos[0].get("invalid_move"))
        return StepResult(
            done=True, reward_terms={"game": float(rewards[0])}, counts={"invalid_moves": 1} if invalid else {}
        )

    async def close(self) -> None:
        """The game holds nothing."""

    def _make(self, seed: Any) -> Any:
        import textarena

        game = textarena.make(self._options.game, **self._options.settings)
        while hasattr(game, "env"):  # wrappers show the whole game again at every move
            game = game.env
        game.reset(num_players=1, seed=seed)
        if game.state.num_players != 1:
            raise ConfigError(f"{self._options.game} is for {game.state.num_players} players; only games for one are played")
        return game

    def _news(self) -> str:
        """What the game has said since the last move."""
        player, messages = self._game.get_observation()
        return "\n".join(str(text) for sender, text, *_ in messages if sender != player)
