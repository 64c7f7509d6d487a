"""`laminar stop | pause | unpause | set`: tell a live run what to do. Each waits until the run has done it, or refused."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from laminar.control import Verb, ask_run
from laminar.errors import ConfigError, RunNotAliveError
from laminar.run_folder import RunFolder

END_SECONDS = 60.0
"""An orderly stop finishes a step, which may take long; what the supervisor does not end in 20 s it kills."""
POLL_SECONDS = 0.1
BY = "command line"

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder", show_default=False)]


def stop(
    run: RunArgument,
    now: Annotated[
        bool, typer.Option("--now", help="End at once, without finishing the step or saving a checkpoint")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Return when everything of the run is gone")] = True,
) -> None:
    """Stop a run: the step is finished and saved first, unless --now."""
    folder = RunFolder.open(run)
    typer.echo(asyncio.run(ask_run(folder, Verb.STOP, {"how": "now" if now else "drain"}, BY)))
    if wait:
        _wait_for_end(folder)


def pause(run: RunArgument) -> None:
    """Let rollouts admit nothing; what is in flight is played to its end, and the trainer trains what is ready."""
    typer.echo(asyncio.run(ask_run(RunFolder.open(run), Verb.PAUSE, {}, BY)))


def unpause(run: RunArgument) -> None:
    """Let rollouts admit again."""
    typer.echo(asyncio.run(ask_run(RunFolder.open(run), Verb.UNPAUSE, {}, BY)))


def set_value(
    run: RunArgument,
    setting: Annotated[str, typer.Argument(help="Such as staleness.max_staleness=3 or rollout.max_in_flight_groups=32")],
) -> None:
    """Change a setting of a live run: the staleness bound, or the in-flight limit of each worker."""
    key, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"{setting!r} is not of the form key=value, such as staleness.max_staleness=3")
    typer.echo(asyncio.run(ask_run(RunFolder.open(run), Verb.SET, {"key": key.strip(), "value": value.strip()}, BY)))


def _wait_for_end(folder: RunFolder) -> None:
    deadline = time.monotonic() + END_SECONDS
    while folder.is_alive():
        if time.monotonic() > deadline:
            raise RunNotAliveError(
                f"run {folder.path.name} has not ended within {END_SECONDS:g} s; look at logs/, or use --now"
            )
        time.sleep(POLL_SECONDS)
    state = folder.read_state()
    typer.echo(f"{state.status}: {state.reason}")
