"""Environment `gymnasium`: an environment of that package with a discrete action space, played in words.

The policy names an action; the last name in its answer counts. An answer without one is told so, and counted.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from laminar.config.section import Section
from laminar.errors import ConfigError
from laminar.types import Message, Prompt
from rollout.environments.base import Observation, StepResult


class Gymnasium:
    """One episode of an environment; the sum of its rewards is the term `return`."""

    gives_reward = True

    class Options(Section):
        """Settings of `gymnasium`."""

        id: str
        """Name in the package's registry, such as `FrozenLake-v1`; `"module:Name"` imports the module first."""
        actions: list[str]
        """Names of the actions, in the order of their numbers."""
        settings: dict[str, Any] = Field(default_factory=dict)
        """Further arguments, such as `{ is_slippery = false }`."""
        render: bool = True
        """Show the environment's own drawing in text (`render_mode = "ansi"`); false: the observation as it prints."""
        seed_field: str = "seed"
        """Data column with the episode's seed; without it every episode is drawn anew."""

        @field_validator("id")
        @classmethod
        def _is_registered(cls, name: str) -> str:
            try:
                import gymnasium
            except ImportError as error:
                raise ValueError(f"{error}; `pip install laminar-rl[environments]`") from error
            versions = re.compile(rf"{re.escape(name)}-v\d+")
            if ":" in name or any(map(versions.fullmatch, gymnasium.registry)):
                return name  # a module registers it, which only an episode imports; or its newest version is meant
            try:
                gymnasium.spec(name)
            except gymnasium.error.Error as error:
                raise ValueError(str(error)) from error
            return name

        @field_validator("actions")
        @classmethod
        def _unique(cls, actions: list[str]) -> list[str]:
            if len({action.lower() for action in actions}) < len(actions) or not all(actions):
                raise ValueError(f"{actions} must be names that differ")
            return actions

    def __init__(self, options: Options) -> None:
        self._options = options
        self._numbers: Mapping[str, int] = {name.lower(): number for number, name in enumerate(options.actions)}
        names = "|".join(re.escape(name) for name in sorted(options.actions, key=len, reverse=True))
        self._action = re.compile(rf"(?<!\w)({names})(?!\w)", re.IGNORECASE)
        self._world: Any = None

    async def reset(self, prompt: Prompt) -> Observation:
        """The prompt, and the first state."""
        state = await asyncio.to_thread(self._begin, prompt.fields.get(self._options.seed_field))
        if isinstance(prompt.content, str):
            return Observation((Message("user", f"{prompt.content}\n\n{state}"),))
        return Observation((*prompt.content, Message("user", state)))

    async def step(self, completion: str) -> StepResult:
        """Act as the answer's last action says."""
        found = self._action.findall(completion)
        if not found:
            text = f"That names no action; say one of: {', '.join(self._options.actions)}."
            return StepResult(done=False, observation=Observation(text), counts={"malformed_actions": 1})
        number = self._numbers[found[-1].lower()]
        state, reward, done = await asyncio.to_thread(self._act, number)
        terms = {"return": float(reward)}
        return StepResult(done=done, observation=None if done else Observation(state), reward_terms=terms)

    async def close(self) -> None:
        """Close it."""
        if self._world is not None:
            await asyncio.to_thread(self._world.close)

    def _begin(self, seed: Any) -> str:
        import gymnasium

        mode = {"render_mode": "ansi"} if self._options.render else {}
        self._world = gymnasium.make(self._options.id, **mode, **self._options.settings)
        if not isinstance(self._world.action_space, gymnasium.spaces.Discrete):
            raise ConfigError(
                f"{self._options.id} has actions {self._world.action_space}; only a Discrete space can be named"
            )
        if self._world.action_space.n != len(self._options.actions):
            raise ConfigError(f"{self._options.id} has {self._world.action_space.n} actions; name as many in `actions`")
        observation, _ = self._world.reset(seed=seed)
        return self._shown(observation)

    def _act(self, number: int) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = self._world.step(int(number) + int(self._world.action_space.start))
        return self._shown(observation), float(reward), bool(terminated or truncated)

    def _shown(self, observation: Any) -> str:
        return str(self._world.render()).strip("\n") if self._options.render else str(observation)
