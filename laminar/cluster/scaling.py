"""How many rollout workers a run has: a number in the data module that `laminar scale` changes and the supervisor follows.

A new worker starts from the newest version on its machine, as any. One that goes gives its groups back: others go on with
what had been put by, and its guests go elsewhere. A worker that cannot be placed is told of, and the number goes back; a run
does not end for want of a further worker. It knows neither engines nor groups.
"""

import asyncio
from collections.abc import Callable

import redis.exceptions
from redis.asyncio import Redis

from laminar.cluster.crew import Crew
from laminar.config.rollout import RolloutConfig
from laminar.errors import ConfigError, EnvironmentSetupError
from laminar.telemetry.stream import TelemetryWriter

POLL_SECONDS = 0.5
SPARE_WORKERS = 64
"""Further workers for which a local Ray is told that it has CPUs; they are numbers there, nobody reserves cores."""


def wanted_key(run_id: str) -> str:
    """Where the wanted number of workers stands."""
    return f"laminar:{run_id}:control:rollouts"


async def change_wanted(client: Redis, run_id: str, text: str) -> int:
    """Change the wanted number: `+2` and `-1` are added, `4` is taken as it is; returns the new number.

    Raises:
        ConfigError: it is no number, or would leave no worker.
    """
    if not text.removeprefix("+").removeprefix("-").isdecimal():
        raise ConfigError(f"--rollouts {text!r} is no number of workers; write +2, -1 or 4")
    key = wanted_key(run_id)
    if text[0] in "+-":
        wanted = int(await client.incrby(key, int(text)))
        if wanted < 1:
            await client.incrby(key, -int(text))
            raise ConfigError(f"--rollouts {text} would leave {wanted} workers; a run needs at least 1")
        return wanted
    if int(text) < 1:
        raise ConfigError("--rollouts 0 would leave no worker; stop the run instead")
    await client.set(key, int(text))
    return int(text)


class Scaling:
    """Follows the wanted number.

    Args:
        client: of the data module.
        run_id: the run.
        rollout: how many workers there are at the start, numbered from 0, and whether more of them want a manager.
        crew: starts and retires them.
    """

    def __init__(
        self,
        client: Redis,
        run_id: str,
        rollout: RolloutConfig,
        crew: Crew,
        telemetry: TelemetryWriter,
        say: Callable[[str], None],
    ) -> None:
        self._client, self._key = client, wanted_key(run_id)
        self._rollout, self._num_workers, self._has_manager = rollout, rollout.num_workers, False
        self._crew, self._telemetry, self._say = crew, telemetry, say

    async def run(self) -> None:
        """Start and retire workers until cancelled.

        Consumes: the wanted number. Produces: workers, the highest numbers last come and first gone. Waits for: a change.
        """
        await self._write(self._num_workers)
        async with asyncio.TaskGroup() as group:
            while True:
                if not self._has_manager and self._rollout.wants_manager(self._num_workers):
                    self._has_manager = True
                    group.create_task(self._crew.keep_manager())
                wanted = await self._read()
                while self._num_workers < wanted:
                    group.create_task(self._keep(self._num_workers))
                    self._num_workers += 1
                    await self._tell(f"scaled to {self._num_workers} rollout workers")
                while 1 <= wanted < self._num_workers:
                    self._num_workers -= 1
                    await self._crew.retire_worker(self._num_workers)
                    await self._tell(f"scaled to {self._num_workers} rollout workers")
                await asyncio.sleep(POLL_SECONDS)

    async def _keep(self, index: int) -> None:
        try:
            await self._crew.keep_worker(index)
        except EnvironmentSetupError as error:
            self._num_workers = min(self._num_workers, index)
            await self._write(self._num_workers)
            await self._tell(f"no further worker: {error}")

    async def _read(self) -> int:
        try:
            value = await self._client.get(self._key)
        except (redis.exceptions.RedisError, OSError):
            value = None  # the data keeper sees to it
        return self._num_workers if value is None else int(value)

    async def _write(self, number: int) -> None:
        try:
            await self._client.set(self._key, number)
        except (redis.exceptions.RedisError, OSError):
            return

    async def _tell(self, text: str) -> None:
        self._say(text)
        await self._telemetry.emit("notice", fields={"text": text})
