"""`laminar export`: the policy of a checkpoint as a plain Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from laminar.plugins import load_attribute

EXPORTER = "trainer.export:export_model"
"""Lives above this floor, so it is named, not imported."""


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run folder, or a checkpoint in one")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make")],
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint of this step; the newest if left out")] = None,
) -> None:
    """Write a checkpoint's policy as a plain Hugging Face model: weights, config and tokenizer."""
    typer.echo(load_attribute(EXPORTER)(source, folder, step))
