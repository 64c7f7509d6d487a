"""Hygiene of a run that lives for weeks: logs that others write are rotated, and a disk that runs low is told of in time.

Roles rotate their own logs. What engines, the dashboard, the observer, the data module and a detached supervisor write goes
to files that they keep open: those are copied and cut, which every writer that appends survives; what is written between the
two is lost. It knows neither roles nor what they write.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from laminar.dashboard.alerts import MIN_FREE_RATIO
from laminar.telemetry.stream import TelemetryWriter

logger = logging.getLogger("laminar.supervisor")

LOOK_SECONDS = 10.0
LOG_BYTES = 32 * 1024**2
OLD_LOGS = 2
"""A role's log is rotated at this size, and so many old ones are kept."""
MAX_LOG_BYTES = LOG_BYTES + 1024**2
"""A little more than what roles keep their own logs below."""
LOW_AGAIN_SECONDS = 3600.0


class Housekeeper:
    """Looks after one run's files.

    Args:
        folders: whose `*.log` files are rotated.
        disks: folders whose disks are watched.
        telemetry: told of a disk that runs low.
        say: for the user.
        max_log_bytes: size at which a log is rotated.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        disks: Sequence[Path],
        telemetry: TelemetryWriter,
        say: Callable[[str], None],
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        self._folders, self._disks, self._telemetry, self._say = folders, disks, telemetry, say
        self._max_log_bytes = max_log_bytes
        self._told: dict[Path, float] = {}

    async def run(self) -> None:
        """Look from time to time until cancelled.

        Consumes: files and disks. Produces: rotated logs, warnings. Waits for: the next look.
        """
        while True:
            for folder in self._folders:
                await asyncio.to_thread(rotate_logs, folder, self._max_log_bytes)
            await self.watch_disks(time.monotonic())
            await asyncio.sleep(LOOK_SECONDS)

    async def watch_disks(self, now: float) -> None:
        """Tell of every disk that runs low, not again within the hour."""
        for place in self._disks:
            try:
                usage = await asyncio.to_thread(shutil.disk_usage, place)
            except OSError as error:
                logger.info("the disk of %s cannot be looked at (%s)", place, error)
                continue
            was_told = now - self._told.get(place, -LOW_AGAIN_SECONDS) < LOW_AGAIN_SECONDS
            if usage.free >= MIN_FREE_RATIO * usage.total or was_told:
                continue
            self._told[place] = now
            text = f"disk low: {usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB are free in {place}; make room"
            self._say(text)
            await self._telemetry.emit("notice", fields={"text": text})


def rotate_logs(folder: Path, max_bytes: int) -> list[Path]:
    """Copy and cut every log that has grown too large; returns them. One that cannot be rotated stays as it is."""
    rotated = []
    for log in sorted(folder.glob("*.log")):
        try:
            if log.stat().st_size > max_bytes:
                _rotate(log)
                rotated.append(log)
        except OSError as error:
            logger.warning("%s cannot be rotated (%s)", log, error)
    return rotated


def _rotate(log: Path) -> None:
    for number in range(OLD_LOGS, 1, -1):
        older = log.with_name(f"{log.name}.{number - 1}")
        if older.exists():
            os.replace(older, log.with_name(f"{log.name}.{number}"))
    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    os.truncate(log, 0)
