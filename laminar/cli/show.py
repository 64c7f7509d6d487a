"""`laminar show`: the newest trajectories of a run in a list, or one of them as it was played."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laminar.cli.control import RunArgument
from laminar.dashboard.search import Search, search
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder
from laminar.trajectories import Record, Summary, TrajectoryFolder

OPEN, CLOSE = "[[", "]]"
STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")


def show(
    run: RunArgument,
    trajectory: Annotated[
        str, typer.Argument(metavar="ID", help="A trajectory's id, or the beginning of it; a list if left out")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=1000, help="Of the list")] = 20,
    order: Annotated[str, typer.Option(help="newest, reward_low, reward_high, longest, shortest, stalest")] = "newest",
) -> None:
    """Show a kept trajectory: what was given, what was sampled and by which version, and what came of it."""
    folder = RunFolder.open(run)
    records = TrajectoryFolder(folder.trajectories)
    if not trajectory:
        _show_list(folder, records.summaries(), order, lines, as_json)
        return
    summary = records.find(trajectory)
    record = None if summary is None else records.read(summary)
    if record is None:
        raise ConfigError(
            f"run {folder.path.name} keeps no trajectory {trajectory!r} ({len(records.summaries())} are kept; "
            "metrics.trajectory_rate says what share of groups is kept)"
        )
    if as_json:
        typer.echo(json.dumps(record))
    else:
        console = Console()
        has_colours = console.color_system is not None and not console.no_color
        console.print(*describe(record, has_colours), sep="\n", highlight=False, soft_wrap=True)


def _show_list(folder: RunFolder, kept: list[Summary], order: str, num_lines: int, as_json: bool) -> None:
    try:
        found = search(kept, Search.model_validate({"order": order}))[:num_lines]
    except ValidationError as error:
        raise ConfigError(f"--order {order}: {error.errors()[0]['msg']}") from error
    if as_json:
        typer.echo(json.dumps([asdict(summary) for summary in found]))
        return
    if not kept:
        typer.echo(
            f"run {folder.path.name} keeps no trajectories; metrics.trajectory_rate says what share of groups is kept"
        )
        return
    table = Table(box=None, pad_edge=False)
    for name in ("id", "reward", "tokens", "versions", "step", "staleness", "end", "answer"):
        table.add_column(name, justify="right" if name in ("reward", "tokens", "step", "staleness") else "left")
    for summary in found:
        table.add_row(*map(Text, _cells(summary)))
    Console().print(table)
    typer.echo(f"{len(found)} of {len(kept)} kept trajectories; `laminar show {folder.path} ID` shows one of them")


def _cells(summary: Summary) -> tuple[str, ...]:
    oldest, newest = summary.oldest, summary.newest
    return (
        summary.trajectory_id,
        "-" if summary.reward is None else f"{summary.reward:g}",
        str(summary.num_sampled_tokens),
        "-" if oldest < 0 else str(oldest) if oldest == newest else f"{oldest} to {newest}",
        "-" if summary.step is None else str(summary.step),
        "-" if summary.staleness is None else str(summary.staleness),
        summary.failure or summary.finish_reason,
        " ".join(summary.text.split()),
    )


def describe(record: Record, has_colours: bool) -> list[Text]:
    """The record as lines: facts, then the text.

    What was sampled is coloured by version and what was given is dim; without colours what was sampled stands in brackets,
    after its version.
    """
    failure = record["failure"]
    outcome = f"failed: {failure['kind']}: {failure['text']}" if failure else f"reward {record['reward']:g}"
    terms = "".join(f", {name} {value:g}" for name, value in record["reward_terms"].items())
    trained = (
        "not trained" if record["step"] is None else f"trained in step {record['step']}, staleness {record['staleness']}"
    )
    versions = list(dict.fromkeys(s["version"] for chain in record["chains"] for s in chain if s["version"] is not None))
    lines = [
        Text(f"{record['trajectory_id']}  prompt {record['prompt_id']}  {record['worker']}  attempt {record['attempt']}"),
        Text(f"{outcome}{terms}; {trained}; ended by {record['finish_reason'] or '-'}"),
        Text(f"{record['num_sampled_tokens']} sampled tokens of versions ").append_text(_legend(versions)),
    ]
    if not has_colours:
        lines.append(Text(f"sampled is what stands in {OPEN}VERSION|...{CLOSE}, all else was given"))
    for chain in record["chains"]:
        line = Text()
        for segment in chain:
            version = segment["version"]
            style = "dim" if version is None else STYLES[versions.index(version) % len(STYLES)]
            text = "".join(segment["tokens"])
            line.append(text if has_colours or version is None else f"{OPEN}{version}|{text}{CLOSE}", style)
        lines.append(line)
    return lines


def _legend(versions: list[str]) -> Text:
    legend = Text()
    for number, version in enumerate(versions):
        legend.append(f"{version} ", STYLES[number % len(STYLES)])
    return legend
