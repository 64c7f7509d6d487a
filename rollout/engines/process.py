"""An engine as a child process: started, awaited until it listens, ended with everything it started.

Invariants: the child runs in a process group of its own, with pinned threads, its errors in a log file; it ends when we do
(its standard input is our lifeline). This module does not know the protocol.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from laminar.errors import ConfigError, DeadlineError, EngineError
from laminar.types import WeightVersion

LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """What a new engine process needs to know.

    Attributes:
        model: HF checkpoint folder.
        version: name of its weights.
        token: bearer token it will demand (handed over in the environment, not on the command line that everybody can read).
        run_id: the run that may change its weights.
        log: file for its output, appended.
        kind: engine kind, a key of `COMMANDS`.
        python: interpreter; empty: ours.
        options: further flags, by name without dashes; true means a flag without value, false none.
    """

    model: Path
    version: WeightVersion
    token: str
    run_id: str
    log: Path
    kind: str = "torch"
    python: str = ""
    max_running: int = 64
    max_cached_tokens: int = 65536
    num_threads: int = 1
    options: dict[str, str | int | float | bool] = field(default_factory=dict)


def torch_command(launch: EngineLaunch, ready_descriptor: int) -> list[str]:
    """Command line of the torch engine."""
    values: dict[str, str | int | float | bool] = {
        "model": str(launch.model),
        "weight-version": str(launch.version),
        "run-id": launch.run_id,
        "max-running": launch.max_running,
        "max-cached-tokens": launch.max_cached_tokens,
        "threads": launch.num_threads,
        "ready-fd": ready_descriptor,
        "lifeline": True,
        **launch.options,
    }
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in values.items() if value is not False]
    return [launch.python or sys.executable, "-m", "rollout.engines.server", *flags]


COMMANDS: dict[str, Callable[[EngineLaunch, int], list[str]]] = {"torch": torch_command}
"""Command line by engine kind; it must write one JSON line with its `url` to the descriptor once it listens."""


class EngineProcess:
    """One engine process.

    Args:
        launch: what to start.

    Raises:
        ConfigError: if the kind is not known.
    """

    def __init__(self, launch: EngineLaunch) -> None:
        if launch.kind not in COMMANDS:
            raise ConfigError(f"rollout.engine.kind {launch.kind!r} is not known; choose one of {', '.join(COMMANDS)}")
        self._launch = launch
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
        try:
            async with asyncio.timeout(deadline_seconds):
                line = await read_line(reading)
        except TimeoutError as error:
            await self.kill()
            raise DeadlineError(f"the engine to start (log: {self._launch.log})", deadline_seconds) from error
        except BaseException:
            await self.kill()
            raise
        if not line:
            await self.kill()
            raise EngineError(f"the engine ended while starting; {self._launch.log} ends with: {log_tail(self._launch.log)}")
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
                *COMMANDS[launch.kind](launch, ready_descriptor),
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
