"""Run untrusted programs in containers, where Docker or Podman runs: one for each program, a few of them started ahead.

Invariants: a container plays one program and is removed, with all its processes; it has no network, no capability, a
read-only image and a folder in memory; its first process reads a pipe of ours, so that it ends when we do, killed or not.
It does not know what programs are for. Never run on a real engine yet (rollout/README.md).
"""

import asyncio
import contextlib
import functools
import io
import shutil
import signal
import sys
import tarfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from laminar.config.section import Section
from laminar.types import FailureKind
from rollout.boundary import EpisodeError
from rollout.sandbox.run import Ended, Limits, Outcome, Program, check_files, read_limited

ENGINES = ("docker", "podman")
_ENGINE_FAILED = 125
"""Exit code of the engine's own failures; those above 128 tell of a signal."""
_STDERR_CHARACTERS = 300


class Container(Section):
    """Where programs run."""

    image: str = Field(min_length=1)
    """Such as `python:3.11-slim`; it must be there already, and have `sh`, `tar` and what programs need."""
    engine: Literal["auto", "docker", "podman"] = "auto"
    """`auto`: the first of the two that answers."""
    warm: int = Field(2, ge=0)
    """Containers of one worker that wait, started, for a program."""
    start_seconds: float = Field(60, gt=0)
    """Deadline of a container's start, and of the engine's answers."""


@dataclass(frozen=True, slots=True)
class _Started:
    name: str
    process: asyncio.subprocess.Process


class ContainerPool:
    """One worker's containers for programs under the same limits."""

    def __init__(self, options: Container, limits: Limits) -> None:
        self._options, self._limits = options, limits
        self._engine = ""
        self._ready: list[_Started] = []
        self._refills: set[asyncio.Task[None]] = set()

    async def run(self, program: Program) -> Outcome:
        """Run a program to its end, or to its first broken limit. The interpreter of `python_program` is the image's own.

        Raises:
            EpisodeError: of kind `tool`: no engine answers, or it fails.
            ValueError: as `check_files`.
        """
        check_files(program)
        container = await self._take()
        try:
            await self._put_files(container, program)
            return await self._execute(container, program)
        finally:
            await self._remove(container)

    async def close(self) -> None:
        """Remove those that wait."""
        for refill in list(self._refills):
            refill.cancel()
        await asyncio.gather(*self._refills, return_exceptions=True)
        ready, self._ready = self._ready, []
        await asyncio.gather(*[self._remove(container) for container in ready])

    async def _take(self) -> _Started:
        """One that waits, or a new one; meanwhile others are started."""
        if not self._engine:
            self._engine = await find_engine(self._options.engine, self._options.start_seconds)
        self._ready = [container for container in self._ready if container.process.returncode is None]
        container = self._ready.pop() if self._ready else await self._start()
        for _ in range(self._options.warm - len(self._ready) - len(self._refills)):
            task = asyncio.create_task(self._refill())
            self._refills.add(task)
            task.add_done_callback(self._refills.discard)
        return container

    async def _refill(self) -> None:
        with contextlib.suppress(EpisodeError):  # whoever needs one will hear of it
            self._ready.append(await self._start())

    async def _start(self) -> _Started:
        name = f"laminar-{uuid.uuid4().hex}"
        command = [self._engine, *run_arguments(name, self._options, self._limits)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        container = _Started(name, process)
        assert process.stdout
        assert process.stderr
        line = b""
        try:
            async with asyncio.timeout(self._options.start_seconds):
                line = await process.stdout.readline()
                errors = b"" if line else await process.stderr.read()
        except TimeoutError as error:
            raise _trouble(f"image {self._options.image} did not start in {self._options.start_seconds:g} s") from error
        finally:
            if not line:
                await self._remove(container)
        if not line:
            raise _trouble(f"image {self._options.image} cannot be started: {_shown(errors)}")
        return container

    async def _put_files(self, container: _Started, program: Program) -> None:
        if program.files:
            code, errors = await self._call(["exec", "-i", container.name, "tar", "-x", "-C", "/box"], _packed(program))
            if code:
                raise _trouble(f"files cannot be put into it: {_shown(errors)}")

    async def _execute(self, container: _Started, program: Program) -> Outcome:
        limits, pipe = self._limits, asyncio.subprocess.PIPE
        command = [self._engine, *exec_arguments(container.name, program, limits)]
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        overflow = asyncio.Event()
        reading = [read_limited(stream, limits.output_bytes, overflow) for stream in (process.stdout, process.stderr)]
        streams = [asyncio.create_task(stream) for stream in reading]
        overflowed, ended = asyncio.create_task(overflow.wait()), asyncio.create_task(process.wait())
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(program.stdin.encode("utf-8", "surrogateescape"))
                process.stdin.close()
            done = {ended, overflowed}
            await asyncio.wait(done, timeout=limits.wall_seconds, return_when=asyncio.FIRST_COMPLETED)
            code = process.returncode
            if code is None or overflow.is_set():
                await self._remove(container)  # ends all that runs in it, and so the streams
            await asyncio.wait(streams, timeout=self._options.start_seconds)
        finally:
            for task in (*streams, overflowed, ended):
                task.cancel()
            if process.returncode is None:
                process.kill()
        output, errors = [s.result().decode("utf-8", "replace") if s.done() else "" for s in streams]
        if code == _ENGINE_FAILED:
            raise _trouble(f"the engine failed: {_shown(errors.encode())}")
        ending, number = (Ended.OUTPUT, 0) if overflow.is_set() else _ending(code)
        return Outcome(ending, number, output, errors, isolated=True)

    async def _remove(self, container: _Started) -> None:
        if container.process.returncode is None:
            with contextlib.suppress(EpisodeError):
                await self._call(["rm", "-f", container.name], b"")
            with contextlib.suppress(ProcessLookupError):
                container.process.kill()
            await container.process.wait()

    async def _call(self, arguments: Sequence[str], data: bytes) -> tuple[int, bytes]:
        pipe = asyncio.subprocess.PIPE
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(self._engine, *arguments, stdin=pipe, stdout=null, stderr=pipe)
        try:
            async with asyncio.timeout(self._options.start_seconds):
                _, errors = await process.communicate(data)
        except TimeoutError as error:
            raise _trouble(f"`{arguments[0]}` took longer than {self._options.start_seconds:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
        return process.returncode or 0, errors


@functools.lru_cache(maxsize=16)
def _kept_pool(options: str, limits: str) -> ContainerPool:
    return ContainerPool(Container.model_validate_json(options), Limits.model_validate_json(limits))


def shared_pool(options: Container, limits: Limits) -> ContainerPool:
    """This process's pool of such containers: tools are made anew for every episode, and containers are to outlast them."""
    return _kept_pool(options.model_dump_json(), limits.model_dump_json())


async def find_engine(wanted: str, seconds: float) -> str:
    """The engine's program.

    Raises:
        EpisodeError: of kind `tool`: none is installed, or none answers.
    """
    troubles = []
    for name in ENGINES if wanted == "auto" else (wanted,):
        program = shutil.which(name)
        if program is None:
            troubles.append(f"{name} is not installed")
            continue
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(program, "version", stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(seconds):
                _, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            errors = f"no answer in {seconds:g} s".encode()
        if process.returncode == 0:
            return program
        troubles.append(f"{name}: {_shown(errors)}")
    text = f"no container engine answers ({'; '.join(troubles)}); start one, or remove `container`"
    raise EpisodeError(FailureKind.TOOL, f"{text} to run programs in the sandbox of processes")


def run_arguments(name: str, options: Container, limits: Limits) -> list[str]:
    """How a container is started; its first process says that it is there, and ends when its input does."""
    return [
        "run", "-i", "--rm", "--pull", "never", "--name", name, "--label", "laminar", "--network", "none", "--read-only",
        "--tmpfs", f"/box:rw,exec,nosuid,nodev,size={limits.disk_bytes},mode=1777", "--workdir", "/box",
        "--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes), "--cpus", "1",
        "--pids-limit", str(limits.processes + 2), "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        "--user", "65534:65534", "--ulimit", "nofile=256:256", "--ulimit", "core=0:0",
        "--ulimit", f"fsize={limits.file_bytes}:{limits.file_bytes}", "--env", "HOME=/box", "--env", "TMPDIR=/box",
        options.image, "/bin/sh", "-c", "echo ready; exec cat > /dev/null",
    ]  # fmt: skip


def exec_arguments(name: str, program: Program, limits: Limits) -> list[str]:
    """How a program is run in a started container."""
    environment = [part for key, value in program.environment.items() for part in ("--env", f"{key}={value}")]
    seconds = max(1, round(limits.cpu_seconds))
    script = f'ulimit -St {seconds}; ulimit -Ht {seconds + 2}; exec "$@"'
    arguments = list(program.arguments)
    if arguments[0] == sys.executable:
        arguments[0] = "python3"
    return ["exec", "-i", *environment, name, "/bin/sh", "-c", script, "box", *arguments]


def _packed(program: Program) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in program.files.items():
            data = text.encode("utf-8", "surrogateescape")
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _ending(code: int | None) -> tuple[Ended, int]:
    """Why a program ended, by the engine's exit code; None if it was not waited for any longer."""
    if code is None:
        return Ended.WALL, 0
    if code <= 128:
        return Ended.EXIT, code
    number = code - 128
    kinds = {int(signal.SIGXCPU): Ended.CPU, int(signal.SIGKILL): Ended.MEMORY}  # nobody else kills in there
    return (kinds[number], 0) if number in kinds else (Ended.SIGNAL, number)


def _trouble(text: str) -> EpisodeError:
    return EpisodeError(FailureKind.TOOL, f"container: {text}")


def _shown(errors: bytes) -> str:
    return " ".join(errors.decode("utf-8", "replace").split())[-_STDERR_CHARACTERS:] or "it says nothing"
