"""`laminar show`: one trajectory of a run, as it was played."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from laminar.cli.control import RunArgument
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder
from laminar.trajectories import Record, TrajectoryFolder

STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")


def show(
    run: RunArgument,
    trajectory: Annotated[str, typer.Argument(metavar="ID", help="A trajectory's id, or the beginning of it")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON")] = False,
) -> None:
    """Show a kept trajectory: what was given, what was sampled and by which version, and what came of it."""
    folder = RunFolder.open(run)
    records = TrajectoryFolder(folder.trajectories)
    summary = records.find(trajectory)
    record = None if summary is None else records.read(summary)
    if record is None:
        raise ConfigError(
            f"run {folder.path.name} keeps no trajectory {trajectory!r} ({len(records.summaries())} are kept; "
            "metrics.trajectory_rate says what share of groups is)"
        )
    if as_json:
        typer.echo(json.dumps(record))
    else:
        Console().print(*describe(record), sep="\n", highlight=False, soft_wrap=True)


def describe(record: Record) -> list[Text]:
    """The record as lines: facts, then the text, coloured by version; what was given is dim."""
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
    for chain in record["chains"]:
        line = Text()
        for segment in chain:
            version = segment["version"]
            style = "dim" if version is None else STYLES[versions.index(version) % len(STYLES)]
            line.append("".join(segment["tokens"]), style)
        lines.append(line)
    return lines


def _legend(versions: list[str]) -> Text:
    legend = Text()
    for number, version in enumerate(versions):
        legend.append(f"{version} ", STYLES[number % len(STYLES)])
    return legend
