"""A run that outlives its terminal: its process leads a session of its own and writes into the run folder.

Invariants: the new process has no controlling terminal, so that closing one, or killing its whole session, does not reach
it; this one returns once the run has written its state, or with the reason for which it ended. It does not know what is run.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from laminar.cli.logs import tail
from laminar.errors import DeadlineError, LaminarError, RunFailedError
from laminar.run_folder import RunFolder

ROLE = "supervisor"
"""Whose log the output is."""
START_SECONDS = 60.0
POLL_SECONDS = 0.05
LAST_LINES = 3


def start_detached(folder: RunFolder, arguments: Sequence[str]) -> int:
    """Start a `laminar` command that lives on in a run folder; returns its process id once it has written its state.

    Args:
        folder: where its output goes, `logs/supervisor.log`.
        arguments: of the command, its name first.

    Raises:
        LaminarError: it ended at once, with its exit code and last words.
        DeadlineError: it said nothing in time; it is ended.
    """
    log = folder.logs / f"{ROLE}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "laminar.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "150"},
        )
    deadline = time.monotonic() + START_SECONDS
    while not (folder.has_state() and folder.read_state().pid == process.pid):
        if (code := process.poll()) is not None:
            raise _ended(code, log)
        if time.monotonic() > deadline:
            process.kill()
            raise DeadlineError(f"the run to begin (its output: {log})", START_SECONDS)
        time.sleep(POLL_SECONDS)
    return process.pid


def tell(folder: RunFolder, pid: int) -> None:
    """Say what was started, how to follow it, and how to stop it."""
    path, log = folder.path, folder.logs / f"{ROLE}.log"
    typer.echo(f"run {path.name} goes on by itself as process {pid}")
    typer.echo(f"  follow: laminar logs {path} {ROLE} -f   (or tail -f {log})")
    typer.echo(f"  look:   laminar status {path}")
    typer.echo(f"  stop:   laminar stop {path}")


def _ended(code: int, log: Path) -> LaminarError:
    words = " / ".join(tail(log, LAST_LINES)).removeprefix("laminar: ")
    error = RunFailedError(f"the detached run ended at once (exit code {code}): {words or 'it said nothing'}; see {log}")
    error.exit_code = code if code > 0 else RunFailedError.exit_code
    return error
