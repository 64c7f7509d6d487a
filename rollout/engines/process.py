"""An engine as a child process: started, awaited until it listens, ended with everything it started.

Invariants: the child runs in a process group of its own, with pinned threads, its errors in a log file; it ends when we do
(its standard input is our lifeline). This module does not know the protocol.
"""

import asyncio
import contextlib
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from laminar.errors import DeadlineError, EngineError
from rollout.engines.launch import EngineLaunch, engine_kind

LOG_TAIL_BYTES = 2000


class EngineProcess:
    """One engine process.

    Args:
        launch: what to start.

    Raises:
        ConfigError: if the kind is not known.
    """

    def __init__(self, launch: EngineLaunch) -> None:
        self._launch, self._command = launch, engine_kind(launch.kind).command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id.

        Raises:
            EngineError: if it was never started.
        """
        if self._process is None:
            raise EngineError("the engine process was not started; await start() first")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs or before the start."""
        return None if self._process is None else self._process.returncode

    async def start(self, deadline_seconds: float) -> str:
        """Start and wait until it listens; returns its URL.

        Raises:
            EngineError: if it dies first; with the end of its log.
            DeadlineError: if it takes too long; it is killed.
        """
        reading, writing = os.pipe()
        try:
            await self._spawn(writing)
        finally:
            os.close(writing)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.kill)
            try:
                async with asyncio.timeout(deadline_seconds):
                    line = await read_line(reading)
            except TimeoutError as error:
                raise DeadlineError(f"the engine to start (log: {self._launch.log})", deadline_seconds) from error
            if not line:
                raise EngineError(
                    f"the engine ended while starting; {self._launch.log} ends with: {log_tail(self._launch.log)}"
                )
            undo.pop_all()
        return str(json.loads(line)["url"])

    async def _spawn(self, ready_descriptor: int) -> None:
        launch = self._launch
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(launch.num_threads)
        environment = {
            **os.environ,
            "LAMINAR_ENGINE_TOKEN": launch.token,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONSAFEPATH": "1",
        }
        with launch.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(launch, ready_descriptor),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(ready_descriptor,),
                start_new_session=True,
            )

    async def wait(self) -> int:
        """Wait until it ends; returns its exit status. The caller sets the deadline: an engine lives as long as its run."""
        if self._process is None:
            raise EngineError("the engine process was not started; await start() first")
        return await self._process.wait()

    async def kill(self) -> None:
        """End the whole process group at once and reap it."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


async def read_line(descriptor: int) -> bytes:
    """The first line from a pipe, or nothing if its writer ends; closes the descriptor."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.readline()
    finally:
        transport.close()


def log_tail(path: Path) -> str:
    """The last lines of a log, for an error message."""
    content = path.read_bytes() if path.is_file() else b""
    return content[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(nothing)"
