"""`laminar scale`: more or fewer rollout workers in a live run."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from laminar.errors import ConfigError
from laminar.run_folder import RunFolder


def scale(
    folder: Annotated[Path, typer.Argument(help="The run folder")],
    rollouts: Annotated[str, typer.Option(help="+2 adds two workers, -1 takes one away, 4 makes it four")],
) -> None:
    """Add rollout workers to a live run, or take some away; what those had begun is gone on with by others."""
    run = RunFolder.open(folder)
    state = run.read_state()
    if not run.is_alive() or not state.redis_url:
        raise ConfigError(f"run {state.run_id} is not alive ({state.status}); set rollout.num_workers when you resume it")
    wanted = asyncio.run(_change(state.redis_url, state.run_id, rollouts))
    typer.echo(f"{state.run_id}: {wanted} rollout workers wanted; `laminar status {folder}` shows how it goes on")


async def _change(redis_url: str, run_id: str, rollouts: str) -> int:
    from laminar.cluster.scaling import change_wanted  # brings Ray
    from laminar.experience.client import connect

    client = await connect(redis_url)
    try:
        return await change_wanted(client, run_id, rollouts)
    finally:
        await client.aclose()
