"""`laminar train --replay`: recorded trajectories, trained again without engines."""

from pathlib import Path
from typing import Annotated

import typer

from laminar.config.check import check_config
from laminar.config.load import load_config
from laminar.errors import ConfigError
from laminar.plugins import load_attribute

TRAINER = "trainer.offline:train_recorded"
"""Lives above this floor, so it is named, not imported."""


def train(
    replay: Annotated[
        Path,
        typer.Option(metavar="DIR", help="A run folder, its checkpoints/replay, or its trajectories", show_default=False),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, such as trainer.algorithm.kind=dapo", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Config file; that of the recorded run if left out")
    ] = None,
) -> None:
    """Train the recorded steps of a run again, without engines, into a new run folder."""
    if config is None:
        places = [folder / "config.toml" for folder in (replay, *replay.resolve().parents[:2])]
        config = next((place for place in places if place.is_file()), None)
    if config is None:
        raise ConfigError(f"there is no config.toml at or above {replay}: name one with --config")
    settings = load_config(config, overrides or [])
    check_config(settings)
    folder: Path = load_attribute(TRAINER)(settings, replay, typer.echo)
    typer.echo(f"run folder: {folder}")
