"""Keeps the data module usable: restarts the bundled server when it dies, and fills a server that has forgotten the run.

What was trained is the trainer's to say: only settings and prompts are put back here, and nothing is granted until it
has restored the run. A server that is not ours is waited for, not restarted; roles repeat their requests meanwhile.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import redis.exceptions
from redis.asyncio import Redis

from laminar.cluster.data import RunData
from laminar.config.root import LaminarConfig
from laminar.errors import RunFailedError
from laminar.experience.client import keep_cancellation
from laminar.experience.server import EmbeddedServer
from laminar.telemetry.stream import TelemetryWriter

logger = logging.getLogger("laminar.supervisor")

ROLE = "redis"
"""How the server is named among the restarts."""
CHECK_SECONDS = 0.1
CHECKS_PER_LOOK = 10


class DataKeeper:
    """Watches one run's server.

    Args:
        server: ours, or None if the run uses another.
        client: of the server; survives its restarts, for the URL stays.
        restarts: counted here.
        say: for the user.
        check_seconds: how often our server is looked after; ten times as long lies between two looks at what it holds.

    Attributes:
        config: what is put back; replaced when a setting of the living run changes.
        is_paused: put back as well.
    """

    def __init__(
        self,
        server: EmbeddedServer | None,
        client: Redis,
        data: RunData,
        run_id: str,
        config: LaminarConfig,
        restarts: Counter[str],
        telemetry: TelemetryWriter,
        say: Callable[[str], None],
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._server, self._client, self._data, self._run_id = server, client, data, run_id
        self.config, self.is_paused = config, False
        self._restarts, self._telemetry, self._say, self._check_seconds = restarts, telemetry, say, check_seconds

    async def run(self) -> None:
        """Keep the server until cancelled.

        Consumes: nothing. Produces: restarts, prompts. Waits for: the next look at the server.

        Raises:
            RunFailedError: the server was restarted too often.
            EnvironmentSetupError: it does not come up again.
        """
        checks = 0
        while True:
            if self._server is not None and not self._server.is_running:
                await self._restart(self._server)
                checks = 0
            if checks % CHECKS_PER_LOOK == 0 and await self._has_forgotten():
                logger.warning("the server has forgotten the run; putting its settings and prompts back")
                await self._data.put_into_pool(self._client, self._run_id, self.config, is_paused=self.is_paused)
            checks += 1
            await asyncio.sleep(self._check_seconds)

    async def _restart(self, server: EmbeddedServer) -> None:
        self._restarts[ROLE] += 1
        count, limit = self._restarts[ROLE], self.config.run.max_restarts
        if count > limit:
            raise RunFailedError(f"{ROLE} was restarted {limit} times; see redis/valkey.log in the run folder")
        self._say(f"{ROLE}: the server ended; restarting it ({count})")
        await asyncio.to_thread(server.start)
        await self._telemetry.emit("notice", {f"faults/restarts_{ROLE}": count}, fields={"text": f"{ROLE} restarted"})

    async def _has_forgotten(self) -> bool:
        """Whether the run's settings or some of its prompts are gone; a server that does not answer is asked again later."""
        prefix = f"laminar:{self._run_id}:"
        try:
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.hexists(f"{prefix}run", "next_admission")
                pipeline.hlen(f"{prefix}prompts")
                is_configured, num_prompts = await keep_cancellation(pipeline.execute())
        except (redis.exceptions.RedisError, OSError):
            return False
        return not is_configured or num_prompts < len(self._data.prompts)
