"""How many rollout workers a run has: a number that signed requests change (`laminar scale`) and the supervisor follows.

A new worker starts from the newest version on its machine, as any. One that goes gives its groups back: others go on with
what had been put by, and its guests go elsewhere. A worker that cannot be placed is told of, and the number goes back; a run
does not end for want of a further worker. It knows neither engines nor groups.
"""

import asyncio
import re
from collections.abc import Callable, Mapping

from laminar.cluster.crew import Crew
from laminar.config.rollout import EngineConfig, RolloutConfig
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


def lacking(further: int, engine: EngineConfig, free: tuple[float, float]) -> str:
    """What so many further workers want that is not free (cores, GPUs), and what follows; empty if nothing (pure)."""
    free_cores, free_gpus = (max(0.0, number) for number in free)
    cores, gpus = further * engine.num_threads, further * engine.num_gpus
    if gpus > free_gpus:
        return f"they want {gpus:g} more GPUs and {free_gpus:g} are free; what Ray cannot place in time is given up"
    if cores > free_cores:
        return f"they want {cores} more cores and {free_cores:g} are free; they slow each other, or wait for room"
    return ""


class Scaling:
    """Follows the wanted number.

    Args:
        rollout: how many workers there are at the start, numbered from 0, and whether more of them want a manager.
        crew: starts and retires them.
        telemetry: told of changes.
        say: for the user.
        note_wanted: told of each change of the number, before it is followed.
        free: cores and GPUs that no role uses.

    Attributes:
        wanted: the number.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        crew: Crew,
        telemetry: TelemetryWriter,
        say: Callable[[str], None],
        note_wanted: Callable[[int], None],
        free: Callable[[], tuple[float, float]],
    ) -> None:
        self.wanted = rollout.num_workers
        self._workers = set(range(rollout.num_workers))
        self._rollout, self._has_manager = rollout, False
        self._crew, self._telemetry, self._say = crew, telemetry, say
        self._note_wanted, self._free = note_wanted, free
        self._changed = asyncio.Event()

    async def change(self, arguments: Mapping[str, str]) -> str:
        """`scale`: more or fewer workers, by `rollouts`.

        Raises:
            ConfigError: it is no number, or would leave no worker.
        """
        before, self.wanted = self.wanted, wanted_number(arguments.get("rollouts", ""), self.wanted)
        text, further = f"{before} -> {self.wanted} rollout workers wanted", self.wanted - len(self._workers)
        self._note_wanted(self.wanted)
        self._changed.set()
        lack = lacking(further, self._rollout.engine, await asyncio.to_thread(self._free))
        return f"{text}: {lack}" if lack else text

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
            self._note_wanted(self.wanted)
            await self._tell(f"no further worker: {error}")

    async def _tell(self, text: str) -> None:
        self._say(text)
        await self._telemetry.emit("notice", fields={"text": text})
