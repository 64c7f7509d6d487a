"""Run an untrusted program in a process tree of its own, under limits, and never longer than its wall time.

Invariants: when `run` returns or is cancelled no process of the program is left, and its private folder is gone; output is
read to its limit and no further. With namespaces (Linux, allowed to this user) there is no network and nothing of the
machine but its system folders, read-only. Without, `Outcome.isolated` is false and it is logged once: then limits are all
there is.
This module does not know what programs are for.
"""

import asyncio
import contextlib
import enum
import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from laminar.config.section import Section
from laminar.types import FailureKind
from rollout.boundary import EpisodeError

logger = logging.getLogger("laminar.rollout.sandbox")

_JAIL = Path(__file__).with_name("jail.py")
GRACE_SECONDS = 5.0
"""How long the jail may take beyond the program's wall time, to start, to kill and to tell."""


class Limits(Section):
    """What a program may use, all its processes together where nothing else is said."""

    cpu_seconds: float = Field(5.0, gt=0)
    """CPU time."""
    wall_seconds: float = Field(10.0, gt=0)
    """Time from start to end."""
    memory_bytes: int = Field(512 * 1024**2, ge=1024**2)
    """Memory; of each process, address space too."""
    disk_bytes: int = Field(64 * 1024**2, ge=4096)
    """Private folder, which lies in memory."""
    file_bytes: int = Field(16 * 1024**2, ge=1)
    """Size of any one file."""
    processes: int = Field(32, ge=1)
    """Processes and threads at once."""
    output_bytes: int = Field(64 * 1024, ge=1)
    """Output and errors, each; more ends the program."""
    isolation: Literal["required", "if_available"] = "required"
    """Whether a machine without namespaces refuses to run programs, or runs them with the other limits only."""


class Ended(enum.StrEnum):
    """Why a program ended."""

    EXIT = "exit"
    SIGNAL = "signal"
    WALL = "wall"
    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"
    PROCESSES = "processes"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program.

    Attributes:
        ended: why it ended.
        code: exit code, or number of the signal; 0 if it was killed for a limit.
        output, errors: what it wrote, cut at the limit; text that is no UTF-8 shows as U+FFFD.
        isolated: whether namespaces kept it from the network and the machine's files.
    """

    ended: Ended
    code: int
    output: str
    errors: str
    isolated: bool

    @property
    def is_success(self) -> bool:
        """Exit code 0."""
        return self.ended is Ended.EXIT and self.code == 0


@dataclass(frozen=True, slots=True)
class Program:
    """What to run.

    Attributes:
        arguments: the executable's absolute path, and what follows it.
        files: texts by relative name, put into the private folder, where the program starts.
        stdin: what it may read.
        environment: variables, besides PATH, HOME, TMPDIR and LANG.
        readable: further folders of the machine that it may read.
    """

    arguments: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    readable: Sequence[str] = ()


def python_program(code: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> Program:
    """A Python program, run by this interpreter with its packages, in isolated mode."""
    readable = sorted({str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix)} | {sys.prefix})
    arguments = [sys.executable, "-I", "-B", "main.py"]
    return Program(arguments, {**(files or {}), "main.py": code}, stdin, {"OMP_NUM_THREADS": "1"}, readable)


@functools.cache
def namespaces_available() -> bool:
    """Whether this machine lets this user make the namespaces; asked once."""
    test = [sys.executable, "-I", "-S", "-c", _TEST]
    return subprocess.run(test, capture_output=True, timeout=30, check=False).returncode == 0


_TEST = f"""
import os, sys; sys.argv = ['', '2']; exec(open({str(_JAIL)!r}).read().split('if __name__')[0])
enter_namespaces()
child = os.fork()
if child == 0:
    os._exit(LIBC.unshare(CLONE_REST) != 0)
sys.exit(os.waitpid(child, 0)[1])
"""


async def run(program: Program, limits: Limits) -> Outcome:
    """Run a program to its end, or to its first broken limit.

    Raises:
        EpisodeError: of kind `tool`: the sandbox itself could not be built, or isolation is required and not to be had.
        ValueError: as `check_files`.
    """
    check_files(program)
    isolated = _choose_isolation(limits)
    folder = tempfile.mkdtemp(prefix="laminar-box-")
    try:
        return await _run_in(folder, program, limits, isolated)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_files(program: Program) -> None:
    """Refuse what is the fault of whoever wrote the program, before the sandbox would be blamed for it.

    Raises:
        ValueError: a file's name leads out of the private folder, or a text cannot be written as UTF-8.
    """
    for name, text in {**program.files, ".stdin": program.stdin}.items():
        if os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
            raise ValueError(f"file name {name!r} leads out of the private folder")
        try:
            (name + text).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ValueError(f"file {name!r} holds half of a character and cannot be written: {error.reason}") from error


def _choose_isolation(limits: Limits) -> bool:
    if namespaces_available():
        return True
    if limits.isolation == "required":
        text = (
            'this machine allows no namespaces, so programs would see its files and network; set isolation = "if_available" '
        )
        raise EpisodeError(FailureKind.TOOL, text + "if that is right")
    _warn_once()
    return False


@functools.cache
def _warn_once() -> None:
    logger.warning("no namespaces here: programs run with resource limits only, and see network and files")


async def _run_in(folder: str, program: Program, limits: Limits, isolated: bool) -> Outcome:
    told, tell = os.pipe()
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, told)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", str(_JAIL), str(tell),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                pass_fds=(tell,), start_new_session=True, env={}, cwd="/",
            )  # fmt: skip
        finally:
            os.close(tell)
        try:
            return await _attend(process, told, _specification(folder, program, limits, isolated), limits, isolated)
        finally:
            await _end(process)


async def _attend(process: asyncio.subprocess.Process, told: int, text: bytes, limits: Limits, isolated: bool) -> Outcome:
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with contextlib.suppress(ConnectionError):
        process.stdin.write(len(text).to_bytes(8, "little") + text)
        await process.stdin.drain()
    overflow = asyncio.Event()
    streams = [asyncio.create_task(read_limited(s, limits.output_bytes, overflow)) for s in (process.stdout, process.stderr)]
    overflowed = asyncio.create_task(overflow.wait())
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait(
            {ended, overflowed}, timeout=limits.wall_seconds + GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if overflow.is_set() or not ended.done():
            await _end(process)
        read, _ = await asyncio.wait(streams, timeout=GRACE_SECONDS)  # an orphan may hold a pipe if the jail was killed
        output, errors = [s.result().decode("utf-8", "replace") if s in read else "" for s in streams]
    finally:
        for task in (*streams, overflowed, ended):
            task.cancel()
    if overflow.is_set():
        return Outcome(Ended.OUTPUT, 0, output, errors, isolated)
    os.set_blocking(told, False)
    try:
        report: dict[str, Any] = json.loads(os.read(told, 4096) or b'{"killed": "wall"}')
    except BlockingIOError:
        report = {"killed": "wall"}
    return _outcome(report, output, errors, isolated)


def _outcome(report: dict[str, Any], output: str, errors: str, isolated: bool) -> Outcome:
    if "broken" in report:
        raise EpisodeError(FailureKind.TOOL, f"the sandbox could not be built: {report['broken']}")
    if "killed" in report:
        ended = Ended.WALL if report["killed"] == "abandoned" else Ended(report["killed"])  # its jail was late, and given up
        return Outcome(ended, 0, output, errors, isolated)
    status = report["status"]
    if os.WIFEXITED(status):
        return Outcome(Ended.EXIT, os.WEXITSTATUS(status), output, errors, isolated)
    number = os.WTERMSIG(status)
    return Outcome(Ended.CPU if number == signal.SIGXCPU else Ended.SIGNAL, number, output, errors, isolated)


def _specification(folder: str, program: Program, limits: Limits, isolated: bool) -> bytes:
    sizes = limits.model_dump(exclude={"isolation", "output_bytes"})
    files = {**program.files, ".stdin": program.stdin}
    place = "/box" if isolated else folder
    spec = {
        **sizes, "folder": folder, "files": files, "stdin": f"{place}/.stdin", "isolate": isolated,
        "arguments": list(program.arguments), "environment": dict(program.environment), "readable": list(program.readable),
    }  # fmt: skip
    return json.dumps(spec).encode()


async def read_limited(stream: asyncio.StreamReader, limit: int, overflow: asyncio.Event) -> bytes:
    """Read to the end, since a full pipe would keep the process from being seen to end; keep what is within the limit."""
    received = bytearray()
    while part := await stream.read(1 << 16):
        received += part[: limit + 1 - len(received)]
        if len(received) > limit:
            overflow.set()
    return bytes(received[:limit])


async def _end(process: asyncio.subprocess.Process) -> None:
    """The end of its stdin makes the jail kill everything; then, or if it does not, the jail itself is killed."""
    assert process.stdin
    process.stdin.close()
    if process.returncode is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
