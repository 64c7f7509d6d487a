"""The observer beside a run: a process of its own, started anew when it dies or falls silent.

Invariants: the run never waits for it, and never ends for its sake; what it did not live to write, the supervisor writes
when the run ends. It lives by our end of its standard input, and tells that it lives on its standard output.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from laminar.telemetry.stream import TelemetryWriter

logger = logging.getLogger("laminar.supervisor")

ROLE = "observer"
SILENT_SECONDS = 30.0
"""An observer that says nothing for so long is killed; it speaks four times a second, after each look at the stream."""
START_SECONDS = 60.0
END_SECONDS = 15.0
MAX_PAUSE_SECONDS = 60.0


class ObserverProcess:
    """Keeps one run's observer.

    Args:
        folder: of the run.
        log: file for its output.
        restarts: counted here.
        note_process: told of each process.
        telemetry: told of each restart.
        silent_seconds: see `SILENT_SECONDS`.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        restarts: Counter[str],
        note_process: Callable[[str, int], None],
        telemetry: TelemetryWriter,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._folder, self._log, self._restarts = folder, log, restarts
        self._note_process, self._telemetry, self._silent_seconds = note_process, telemetry, silent_seconds
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep an observer until cancelled; it goes on then, until `end`.

        Consumes: its beats. Produces: observers. Waits for: the next beat, by a deadline.
        """
        while True:
            try:
                why = await self._watch(await self._start())
            except OSError as error:
                why = f"it could not be started ({error})"
            self._restarts[ROLE] += 1
            count = self._restarts[ROLE]
            logger.warning("observer: %s; starting it again (%d)", why, count)
            await self._telemetry.emit(
                "notice", {f"faults/restarts_{ROLE}": count}, fields={"text": f"observer restarted: {why}"}
            )
            await asyncio.sleep(pause_seconds(count))

    async def end(self) -> bool:
        """Let it write what it has not, and end; whether it did so in order and in time."""
        process, self._process = self._process, None
        if process is None:
            return False
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        _kill(process)
        return await process.wait() == 0

    async def _start(self) -> asyncio.subprocess.Process:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "laminar.telemetry.observe", str(self._folder)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )
        self._note_process(ROLE, self._process.pid)
        return self._process

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        """Listen to it until it ends, or is ended for its silence; why."""
        assert process.stdout is not None
        seconds = START_SECONDS
        while True:
            try:
                async with asyncio.timeout(seconds):
                    beats = await process.stdout.read(1024)
            except TimeoutError:
                _kill(process)
                await process.wait()
                return f"it was silent for {seconds:g} s"
            if not beats:
                return f"it ended with status {await process.wait()}"
            seconds = self._silent_seconds


def pause_seconds(restarts: int) -> float:
    """Before the next start: twice as long each time, at most `MAX_PAUSE_SECONDS`, after however many."""
    return min(MAX_PAUSE_SECONDS, 0.1 * 2 ** min(restarts, 10))


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
