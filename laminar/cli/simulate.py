"""`laminar simulate`: play a config on imagined machines, to choose split and staleness bound. Starts nothing."""

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from laminar.cli.check import ConfigArgument
from laminar.config.check import check_config
from laminar.config.load import load_config
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder
from laminar.simulate.calibrate import adapted, calibrate, observe
from laminar.simulate.from_config import Setting, setting_of
from laminar.simulate.report import advice_lines, as_json, html, text_table, write_png
from laminar.simulate.sweep import Searches, advise, overrides_of, simulate_rows

MAX_GPUS = 16_384
"""Advice for 512 takes a minute or two; the time grows with their number."""


def simulate(
    config: ConfigArgument,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings such as rollout.num_workers=16.", show_default=False)
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="Values to compare, such as staleness.max_staleness=0,1,2,4,8; repeatable")
    ] = None,
    gpus: Annotated[str, typer.Option(help="Totals such as 64,128: the best split of each; the config's own if unset")] = "",
    run: Annotated[Path | None, typer.Option("--from", help="Run folder to take lengths and paces from")] = None,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
    advice: Annotated[bool, typer.Option(help="Search for a split and a bound, which takes a few more simulations")] = True,
    png: Annotated[Path | None, typer.Option(help="Write plots into this PNG (needs matplotlib)")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a report with plots into this file")] = None,
) -> None:
    """Simulate a config: throughput, staleness, idle shares and waste by setting, and what to set instead."""
    totals = parse_totals(gpus)

    def load(more: Sequence[str]) -> LaminarConfig:
        loaded = load_config(config, [*(overrides or []), *more])
        check_config(loaded)
        return loaded

    adapt = _adaptation(run)
    searches = Searches(say=lambda text: typer.echo(text, err=True))
    rows = simulate_rows(load, overrides_of(sweep or []), totals, adapt, searches)
    own = [adapt(setting_of(load(()))).num_gpus]
    advices = [advise(load, total, adapt, searches) for total in totals or own] if advice else []
    if html_file is not None:
        _write(html_file, lambda path: path.write_text(html(rows, advices, f"Simulation of {config.name}"), "utf-8"))
    if png is not None:
        _write(png, lambda path: write_png(rows, path))
    if as_json_text:
        typer.echo(json.dumps(as_json(rows, advices)))
        return
    typer.echo(text_table(rows))
    for found in advices:
        typer.echo("\n".join(["", *(textwrap.fill(text, 100) for text in advice_lines(found))]))


def parse_totals(text: str) -> list[int]:
    """`"64,128"` as numbers.

    Raises:
        ConfigError: if one is no number of GPUs, or more than can be played in minutes.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if any(not part.isdecimal() or not 2 <= int(part) <= MAX_GPUS for part in parts):
        raise ConfigError(f"--gpus {text}: write whole numbers from 2 to {MAX_GPUS}, such as 64,128,256")
    return [int(part) for part in parts]


def _adaptation(run: Path | None) -> Callable[[Setting], Setting]:
    if run is None:
        return lambda setting: setting
    folder = RunFolder.open(run)
    observed = observe(folder.trajectories, folder.metrics)
    found = calibrate(setting_of(load_config(folder.config)), observed)
    return lambda setting: adapted(setting, found)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another file") from error
