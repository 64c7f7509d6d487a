"""The supervisor's own helpers, dashboard and sentinel, started again when they die. A run never ends for their sake."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from laminar.telemetry.stream import TelemetryWriter

logger = logging.getLogger("laminar.supervisor")

LOOK_SECONDS = 0.5
MAX_RESTARTS = 100


class Child(Protocol):
    """A process that can be looked at and started again."""

    def ensure(self) -> bool:
        """Start it again if it has ended; whether that was needed."""
        ...


async def keep_children(children: Mapping[str, Child], restarts: Counter[str], telemetry: TelemetryWriter) -> None:
    """Keep them until cancelled; one that dies again and again is left.

    Consumes: their ends. Produces: new ones. Waits for: the next look.
    """
    while True:
        for name, child in children.items():
            try:
                was_needed = restarts[name] < MAX_RESTARTS and child.ensure()
            except OSError as error:
                logger.warning("%s ended and could not be started again (%s)", name, error)
                continue
            if not was_needed:
                continue
            restarts[name] += 1
            logger.warning("%s ended; it was started again (%d)", name, restarts[name])
            await telemetry.emit(
                "notice", {f"faults/restarts_{name}": restarts[name]}, fields={"text": f"{name} ended; started again"}
            )
        await asyncio.sleep(LOOK_SECONDS)
