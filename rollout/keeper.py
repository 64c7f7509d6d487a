"""Keeps one replica's engine alive, and takes the replica out of the rota when its weights are found wrong again and again.

An engine that died, hangs, or was condemned is killed and started on the newest version. A replica in final quarantine is
not started again: its worker leaves in order (its groups go back to the pool, its guests go home), with a notice; where it
was the last one, the run ends and says why. It knows neither groups nor how weights are checked.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from laminar.errors import RunFailedError
from rollout.replica import Replica

logger = logging.getLogger("laminar.rollout.keeper")

CHECK_SECONDS = 0.2
PROBE_SECONDS = 5.0


class EngineKeeper:
    """See the module.

    Args:
        replica: whose engine.
        name: the worker's.
        max_restarts: of the engine, before the run gives up.
        tell: a notice for people.
        has_others: whether another replica is there that holds known weights.
        on_death: called before each restart.
        leave: make the worker go.
    """

    def __init__(
        self,
        replica: Replica,
        name: str,
        max_restarts: int,
        *,
        tell: Callable[[str], Awaitable[None]],
        has_others: Callable[[], Awaitable[bool]],
        on_death: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        self._replica, self._name, self._max_restarts = replica, name, max_restarts
        self._tell, self._has_others, self._on_death, self._leave = tell, has_others, on_death, leave

    async def run(self) -> None:
        """Look after the engine until cancelled, or until the replica leaves.

        Waits for: the next look. Produces: restarts, or the worker's end.

        Raises:
            RunFailedError: the engine was restarted too often, or the last replica's weights are wrong.
        """
        probed = time.monotonic()
        while not self._replica.quarantine.is_final:
            if reason := self._replica.problem():
                await self._restart(reason)
                continue
            if time.monotonic() - probed > PROBE_SECONDS:
                await self._replica.probe()
                probed = time.monotonic()
            await asyncio.sleep(CHECK_SECONDS)
        await self._quarantine()

    async def _restart(self, reason: str) -> None:
        logger.warning("engine: %s; restarting it", reason)
        await self._tell(f"engine restarted: {reason}")
        if self._replica.restarts >= self._max_restarts:
            raise RunFailedError(f"the engine of {self._name} was restarted {self._replica.restarts} times: {reason}")
        self._on_death()
        await self._replica.restart()

    async def _quarantine(self) -> None:
        record = self._replica.quarantine
        text = (
            f"{self._name} is quarantined and leaves the run: its weights were found wrong {record.num_in_row} times in a "
            f"row ({record.reason}); look at its machine, then `laminar scale` brings another worker"
        )
        logger.error("%s", text)
        await self._replica.kill()
        await self._tell(text)
        if not await self._has_others():
            raise RunFailedError(f"{text}; no other replica is left")
        self._leave()
