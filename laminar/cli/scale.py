"""`laminar scale`: more or fewer rollout workers in a live run."""

import asyncio
from typing import Annotated

import typer

from laminar.cli.control import BY, RunArgument
from laminar.control import Verb, ask_run
from laminar.run_folder import RunFolder


def scale(
    run: RunArgument,
    rollouts: Annotated[str, typer.Option(help="+2 adds two workers, -1 takes one away, 4 makes it four")],
) -> None:
    """Add rollout workers to a live run, or take some away; what those had begun is gone on with by others."""
    text = asyncio.run(ask_run(RunFolder.open(run), Verb.SCALE, {"rollouts": rollouts}, BY))
    typer.echo(f"{text}; `laminar status {run}` shows how it goes on")
