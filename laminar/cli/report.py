"""`laminar report`: a run as one HTML file; also written when a run ends."""

import time
from pathlib import Path
from typing import Annotated

import typer

from laminar.cli.control import RunArgument
from laminar.config.load import read_toml
from laminar.config.redact import redact
from laminar.config.toml_text import format_document
from laminar.errors import ConfigError
from laminar.json_lines import iterate_lines
from laminar.run_folder import RunFolder
from laminar.telemetry.html_report import html_report, told


def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; report.html in the run folder")
    ] = None,
) -> None:
    """Write one self-contained HTML file about a run, with plots."""
    folder = RunFolder.open(run)
    path = output or folder.report
    try:
        write_report(folder, path)
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {path} ({error.strerror}); choose another file") from error
    typer.echo(str(path))


def write_report(folder: RunFolder, path: Path) -> None:
    """Write a run's report.

    Raises:
        OSError: the file cannot be written.
    """
    state = folder.read_state()
    lines = told(iterate_lines(folder.metrics))
    facts = {"id": state.run_id, "status": state.status, "reason": state.reason, "lives": state.lives}
    tree = read_toml(folder.config)  # the file as it is: another version of Laminar may have written it
    staleness = tree.get("staleness")
    bound = staleness.get("max_staleness") if isinstance(staleness, dict) else None
    settings = format_document(redact(tree))
    bound = bound if isinstance(bound, int) else None
    path.write_text(html_report(facts, lines, settings, bound=bound, written_at=time.time()), encoding="utf-8")
