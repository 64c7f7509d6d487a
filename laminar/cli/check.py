"""`laminar check`: is this config right? Starts nothing."""

from pathlib import Path
from typing import Annotated

import typer

from laminar.config.check import check_config
from laminar.config.load import load_config

ConfigArgument = Annotated[Path, typer.Argument(help="TOML config file.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(help="Settings such as trainer.learning_rate=1e-6.", show_default=False)
]


def check(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Judge a config without starting anything: keys, values, sizes, plugins and their options, models and data."""
    loaded = load_config(config, overrides or [])
    notes = check_config(loaded)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{config}: right" + (f", with {len(notes)} notes" if len(notes) > 1 else ", with a note" if notes else ""))
