"""`laminar explain`: what a config amounts to. Starts nothing."""

from typing import Annotated

import typer

from laminar.cli.check import ConfigArgument, OverridesArgument
from laminar.config.check import check_config
from laminar.config.explain import explain as explain_config
from laminar.config.load import load_config
from laminar.config.redact import redact
from laminar.config.toml_text import format_document


def explain(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print the whole config instead, defaults filled in, secrets starred.")
    ] = False,
) -> None:
    """Say what a config amounts to: trajectories, batches, optimizer steps, memory, and the worst staleness in words."""
    loaded = load_config(config, overrides or [])
    check_config(loaded)
    typer.echo(format_document(redact(loaded.model_dump())) if toml else explain_config(loaded), nl=False)
