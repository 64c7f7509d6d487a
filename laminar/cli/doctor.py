"""`laminar doctor`: is this machine fit for a run?"""

from pathlib import Path
from typing import Annotated

import typer

from laminar.config.load import load_config
from laminar.errors import EnvironmentSetupError

MARKS = {"good": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}


def doctor(
    config: Annotated[Path | None, typer.Argument(help="Look at what this config would use", show_default=False)] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings", show_default=False)] = None,
) -> None:
    """Look at GPU, memory, limits, ports, Redis, clock and engine; every finding comes with its remedy."""
    from laminar.doctor import examine

    findings = examine(load_config(config, overrides or []) if config else None)
    for finding in findings:
        mark, colour = MARKS[finding.level]
        typer.echo(f"{typer.style(mark, fg=colour)}  {finding.name:<14} {finding.text}")
    bad = [finding.name for finding in findings if finding.level == "bad"]
    if bad:
        raise EnvironmentSetupError(f"this machine is not fit for the run: see {', '.join(bad)} above")
