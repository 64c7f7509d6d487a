"""What of a run's settings may change while it lives, and how the change reaches everybody.

Invariants: a group keeps the bound it was admitted under, and work in flight is never cut short by a change; what is set
also stands in the run folder's config, so a resume goes on with it. It does not know who asks.
"""

from collections.abc import Callable, Mapping
from typing import Any

from laminar.cluster.crew import Crew
from laminar.cluster.data import RunData
from laminar.cluster.data_keeper import DataKeeper
from laminar.config.load import dump_toml, load_config
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder

BOUND = "staleness.max_staleness"
IN_FLIGHT = "rollout.max_in_flight_groups"


class LiveSettings:
    """The changeable part of a living run's settings.

    Args:
        config: what the run was started with.

    Attributes:
        config: today's.
        is_paused: whether rollouts admit nothing.
    """

    def __init__(
        self,
        config: LaminarConfig,
        folder: RunFolder,
        client: Any,
        run_id: str,
        data: RunData,
        keeper: DataKeeper,
        crew: Crew,
    ) -> None:
        self.config, self.is_paused = config, False
        self._folder, self._client, self._run_id = folder, client, run_id
        self._data, self._keeper, self._crew = data, keeper, crew

    async def pause(self, _arguments: Mapping[str, str]) -> str:
        """Admit nothing; what is being played goes on to its end, and the trainer trains what is ready."""
        await self._pause(True)
        return "rollouts admit nothing from now on; what is in flight is played to its end"

    async def unpause(self, _arguments: Mapping[str, str]) -> str:
        """Admit again."""
        await self._pause(False)
        return "rollouts admit again"

    async def set(self, arguments: Mapping[str, str]) -> str:
        """Change one setting: `key` and `value`.

        Raises:
            ConfigError: the setting cannot change in a living run, or the value is wrong.
            OSError: the run folder's config cannot be written; nothing is changed.
        """
        key, value = arguments.get("key", ""), arguments.get("value", "")
        changes: dict[str, Callable[[LaminarConfig], tuple[LaminarConfig, str]]] = {
            BOUND: self._with_bound,
            IN_FLIGHT: self._with_in_flight,
        }
        if key not in changes:
            raise ConfigError(
                f"{key} cannot change in a living run (only {BOUND} and {IN_FLIGHT} can); stop the run, and "
                f"`laminar resume` it with {key}={value}"
            )
        wanted = load_config(self._folder.config, [f"{key}={value}"])
        changed, text = changes[key](wanted)
        self._folder.write_config(dump_toml(wanted))  # first: what a resume would not find is not set either
        await self._apply(changed)
        if key == IN_FLIGHT:
            await self._crew.limit_in_flight(changed.rollout.max_in_flight_groups)
        return f"{key}: {text}"

    def _with_bound(self, wanted: LaminarConfig) -> tuple[LaminarConfig, str]:
        old, new = self.config.staleness, wanted.staleness
        if old.policy == "mask" or not old.bound or not new.bound:
            raise ConfigError(
                f"{BOUND} cannot go from {old.max_staleness} to {new.max_staleness} in a living "
                'run: only between bounds of 1 or more, and not with staleness.policy = "mask"; stop the run and resume it'
            )
        staleness = old.model_copy(update={"max_staleness": new.bound})
        text = f"{old.bound} -> {new.bound}; groups in flight keep the bound they were admitted under"
        return self.config.model_copy(update={"staleness": staleness}), text

    def _with_in_flight(self, wanted: LaminarConfig) -> tuple[LaminarConfig, str]:
        old, new = self.config.rollout.max_in_flight_groups, wanted.rollout.max_in_flight_groups
        rollout = self.config.rollout.model_copy(update={"max_in_flight_groups": new})
        return self.config.model_copy(update={"rollout": rollout}), f"{old} -> {new} groups a worker"

    async def _pause(self, is_paused: bool) -> None:
        self.is_paused = self._keeper.is_paused = is_paused
        await self._apply(self.config)

    async def _apply(self, config: LaminarConfig) -> None:
        self.config = self._keeper.config = config
        await self._data.configure_pool(self._client, self._run_id, config, is_paused=self.is_paused)
