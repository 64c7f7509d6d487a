"""How many rollout workers a run has: a number that signed requests change (`laminar scale`) and the supervisor follows.

A new worker starts from the newest version on its machine, as any. One that goes gives its groups back: others go on with
what had been put by, and its guests go elsewhere. A worker that cannot be placed is told of, and the number goes back; a run
does not end for want of a further worker. It knows neither engines nor groups.
"""

import asyncio
import re
from collections.abc import Callable, Mapping

from laminar.cluster.crew import Crew
from laminar.config.rollout import RolloutConfig
from laminar.errors import ConfigError, EnvironmentSetupError
from laminar.telemetry.stream import TelemetryWriter

SPARE_WORKERS = 64
"""Further workers for which a local Ray is told that it has CPUs; they are numbers there, nobody reserves cores."""


def wanted_number(text: str, now: int) -> int:
    """The number that `+2`, `-1` (added to the present one) or `4` asks for (pure).

    Raises:
        ConfigError: it is no number, or would leave no worker.
    """
    if not re.fullmatch("[+-]?[0-9]{1,6}", text):
        raise ConfigError(f"--rollouts {text!r} is no number of workers; write +2, -1 or 4")
    wanted = now + int(text) if text[0] in "+-" else int(text)
    if wanted < 1:
        raise ConfigError(f"--rollouts {text} would leave {wanted} workers; a run needs at least 1, or stop it instead")
    return wanted


class Scaling:
    """Follows the wanted number.

    Args:
        rollout: how many workers there are at the start, numbered from 0, and whether more of them want a manager.
        crew: starts and retires them.
        telemetry: told of changes.
        say: for the user.

    Attributes:
        wanted: the number.
    """

    def __init__(self, rollout: RolloutConfig, crew: Crew, telemetry: TelemetryWriter, say: Callable[[str], None]) -> None:
        self.wanted = rollout.num_workers
        self._workers = set(range(rollout.num_workers))
        self._rollout, self._has_manager = rollout, False
        self._crew, self._telemetry, self._say = crew, telemetry, say
        self._changed = asyncio.Event()

    async def change(self, arguments: Mapping[str, str]) -> str:
        """`scale`: more or fewer workers, by `rollouts`.

        Raises:
            ConfigError: it is no number, or would leave no worker.
        """
        before, self.wanted = self.wanted, wanted_number(arguments.get("rollouts", ""), self.wanted)
        self._changed.set()
        return f"{before} -> {self.wanted} rollout workers wanted"

    async def run(self) -> None:
        """Start and retire workers until cancelled.

        Consumes: the wanted number. Produces: workers, each the lowest free number; the highest go first. Waits for: a
        change.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                if not self._has_manager and self._rollout.wants_manager(len(self._workers)):
                    self._has_manager = True
                    group.create_task(self._crew.keep_manager())
                await self._changed.wait()
                self._changed.clear()
                while len(self._workers) < self.wanted:
                    index = min(set(range(len(self._workers) + 1)) - self._workers)
                    self._workers.add(index)
                    group.create_task(self._keep(index))
                    await self._tell(f"scaled to {len(self._workers)} rollout workers")
                while self.wanted < len(self._workers):
                    index = max(self._workers)
                    self._workers.remove(index)
                    await self._crew.retire_worker(index)
                    await self._tell(f"scaled to {len(self._workers)} rollout workers")

    async def _keep(self, index: int) -> None:
        try:
            await self._crew.keep_worker(index)
        except EnvironmentSetupError as error:
            self._workers.discard(index)
            self.wanted = min(self.wanted, len(self._workers))
            await self._tell(f"no further worker: {error}")

    async def _tell(self, text: str) -> None:
        self._say(text)
        await self._telemetry.emit("notice", fields={"text": text})
