"""Alerts on their way out: a webhook is called, a command is run.

Invariants: nobody waits for a delivery; every attempt has a deadline, attempts are bounded, and so is what may wait; neither
the webhook's address nor its answer is logged, for an address may hold a secret.
"""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from laminar.config.system import AlertsConfig
from laminar.dashboard.alerts import Alert

logger = logging.getLogger("laminar.observer")

MAX_WAITING = 32
MAX_PAUSE_SECONDS = 30.0
LEVELS = ("warning", "critical")


class DeliveryError(Exception):
    """An attempt failed; the text holds no secret."""


class Deliveries:
    """Delivers alerts, one after another.

    Args:
        config: `[alerts]`.
        run_id: named in each.
        pause_seconds: before the second attempt; doubled before each further one.

    Attributes:
        failed: deliveries that were given up.
    """

    def __init__(self, config: AlertsConfig, run_id: str, pause_seconds: float = 1.0) -> None:
        self._config, self._run_id, self._pause_seconds = config, run_id, pause_seconds
        self._waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_WAITING)
        ways: list[tuple[str, bool, Callable[[dict[str, Any]], Awaitable[None]]]] = [
            ("webhook", bool(config.webhook), self._call),
            ("command", bool(config.command), self._execute),
        ]
        self._ways = [(name, way) for name, wanted, way in ways if wanted]
        self.failed = 0

    def post(self, alert: Alert) -> None:
        """Have an alert delivered, if it is grave enough; returns at once."""
        if not self._ways or LEVELS.index(alert.level) < LEVELS.index(self._config.level):
            return
        message = {
            "run": self._run_id,
            "level": alert.level,
            "name": alert.name,
            "time": time.time(),
            "text": f"[{alert.level}] {self._run_id}: {alert.text}",
        }
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            self.failed += 1
            logger.warning("alerts: %d wait already; %s is not delivered", MAX_WAITING, alert.name)

    async def run(self) -> None:
        """Deliver until cancelled.

        Consumes: posted alerts. Produces: calls and commands. Waits for: the next alert.
        """
        while True:
            message = await self._waiting.get()
            for name, way in self._ways:
                await self._try(name, way, message)
            self._waiting.task_done()

    async def finish(self, seconds: float) -> None:
        """Wait until all is delivered or given up, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._waiting.join()

    async def _try(self, name: str, way: Callable[[dict[str, Any]], Awaitable[None]], message: dict[str, Any]) -> None:
        reason = ""
        for attempt in range(self._config.max_retries + 1):
            if attempt:
                await asyncio.sleep(min(MAX_PAUSE_SECONDS, self._pause_seconds * 2 ** (attempt - 1)))
            try:
                async with asyncio.timeout(self._config.timeout_seconds):
                    return await way(message)
            except TimeoutError:
                reason = f"no answer within {self._config.timeout_seconds:g} s"
            except DeliveryError as error:
                reason = str(error)
        self.failed += 1
        logger.warning("alerts: the %s failed in %d attempts: %s", name, self._config.max_retries + 1, reason)
        return None

    async def _call(self, message: dict[str, Any]) -> None:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(self._config.webhook, json=message, allow_redirects=False) as answer,
            ):
                if not 200 <= answer.status < 300:
                    raise DeliveryError(f"it answered HTTP {answer.status}")
        except (aiohttp.ClientError, ValueError) as error:
            raise DeliveryError(type(error).__name__) from None

    async def _execute(self, message: dict[str, Any]) -> None:
        """The command gets the alert as JSON on its standard input, and its parts in the environment."""
        parts = {f"LAMINAR_ALERT_{name.upper()}": str(value) for name, value in message.items()}
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(self._config.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, **parts},
                start_new_session=True,
            )
        except OSError as error:
            raise DeliveryError(error.strerror or "it cannot be started") from None
        try:
            await process.communicate(json.dumps(message).encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            raise DeliveryError(f"it ended with exit code {process.returncode}")
