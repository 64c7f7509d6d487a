"""`laminar run` and `laminar resume`: one life of a run, with its live panel and its closing report."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.live import Live

from laminar.cli.detach import start_detached, tell
from laminar.cli.report import write_report
from laminar.config.check import check_config
from laminar.config.load import dump_toml, load_config
from laminar.config.root import LaminarConfig
from laminar.json_lines import iterate_lines
from laminar.run_folder import RunFolder
from laminar.telemetry.html_report import told
from laminar.telemetry.panel import render, step_line
from laminar.telemetry.report import closing_report
from laminar.telemetry.stream import Event
from laminar.telemetry.view import RunView

if TYPE_CHECKING:
    from laminar.cluster.supervisor import Outcome, Supervisor

LAST_LIFE_SECONDS = 30.0
"""How long a resume waits for the sentinel of a killed life to clean up."""

STOPPED = 130

OnEvent = Callable[[Event, RunView], None]
Say = Callable[[str], None]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings, such as trainer.learning_rate=1e-6")]
Detach = Annotated[
    bool,
    typer.Option("--detach", "-d", help="Return at once; the run outlives the terminal, its output is in the run folder"),
]


def run(
    config: Annotated[Path, typer.Argument(help="The config file (TOML)")],
    overrides: Overrides = None,
    detach: Detach = False,
    into: Annotated[Path | None, typer.Option(hidden=True, help="The folder that --detach has made")] = None,
) -> None:
    """Start a run and stay with it. Ctrl-C finishes the step, saves a checkpoint and ends everything."""
    settings = load_config(config, overrides or [])
    if into is not None:
        live(settings, RunFolder(into), config.resolve().parent)
        return
    for warning in check_config(settings):
        typer.secho(f"note: {warning}", fg="yellow", err=True)
    folder = RunFolder.create(Path(settings.run.directory), settings.run.name)
    folder.write_config(dump_toml(settings))
    if detach:
        arguments = ["run", str(config.resolve()), *(overrides or []), "--into", str(folder.path.resolve())]
        tell(folder, start_detached(folder, arguments))
        return
    live(settings, folder, config.resolve().parent)


def resume(
    folder: Annotated[Path, typer.Argument(help="The run folder")],
    overrides: Overrides = None,
    detach: Detach = False,
) -> None:
    """Go on from a run's newest checkpoint, under a new lineage."""
    run_folder = RunFolder.open(folder)
    settings = load_config(run_folder.config, overrides or [])
    check_config(settings)
    if detach:
        tell(run_folder, start_detached(run_folder, ["resume", str(folder.resolve()), *(overrides or [])]))
        return
    live(settings, run_folder, run_folder.path)


def live(settings: LaminarConfig, folder: RunFolder, config_folder: Path) -> None:
    """Run one life in the foreground and print its report."""
    lock = folder.begin_life(LAST_LIFE_SECONDS)
    from laminar.cluster.supervisor import Supervisor  # brings Ray, which takes seconds

    console = Console()
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    wanted = settings.metrics.panel
    show_panel = wanted == "on" or (wanted == "auto" and sys.stdout.isatty())
    with screen(console, settings, show_panel) as (on_event, say):
        supervisor = Supervisor(settings, folder, config_folder, lock, on_event, say)
        try:
            was_cut = _run_to_the_end(supervisor)
        finally:
            with contextlib.suppress(OSError):
                write_report(folder, folder.report)
    lines = told(iterate_lines(folder.metrics))
    console.print(closing_report(outcome_facts(supervisor.outcome), lines))
    if was_cut:
        _leave()
    if supervisor.outcome.status == "stopped":
        raise typer.Exit(STOPPED)


def _run_to_the_end(supervisor: "Supervisor") -> bool:
    """Run one life; whether it was ended at once."""
    try:
        asyncio.run(supervisor.run())
    except (asyncio.CancelledError, KeyboardInterrupt):
        return True
    return False


def _leave() -> NoReturn:
    """End this process, everything of the run being gone, without waiting for threads that nobody waits for: a download."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(STOPPED)


@contextlib.contextmanager
def screen(console: Console, settings: LaminarConfig, show_panel: bool) -> Iterator[tuple[OnEvent, Say]]:
    """Where events and words go: the live panel, or one line each. A closed terminal or pipe ends the words, not the run."""
    title = f"laminar · {settings.run.name}"
    if not show_panel:

        def say(text: str) -> None:
            with contextlib.suppress(OSError):
                console.print(text, highlight=False, soft_wrap=True)

        def print_event(event: Event, view: RunView) -> None:
            if event.kind == "step":
                say(step_line(view))
            elif event.kind == "restored" and event.fields.get("lineage", 0):
                say(view.restores[-1])
            elif event.kind == "notice":
                say(view.notices[-1])
            elif event.kind == "waiting":
                say(f"trainer waits for {view.trainer_wait}")

        yield print_event, say
        return
    with Live(console=console, refresh_per_second=4, transient=False) as panel:

        def show(text: str) -> None:
            with contextlib.suppress(OSError):
                panel.console.print(text, highlight=False)

        def update(_event: Event, view: RunView) -> None:
            with contextlib.suppress(OSError):
                panel.update(render(view, title, settings.staleness.bound))

        yield update, show


def outcome_facts(outcome: "Outcome") -> dict[str, object]:
    """What the closing report says besides the metrics."""
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "folder": str(outcome.folder.path),
        "seconds": outcome.seconds,
        "peak_resident_bytes": outcome.peak_resident_bytes,
        "restarts": dict(outcome.restarts),
        "first_step": outcome.view.first_step,
        "step_seconds": outcome.view.step_seconds,
        "trained_tokens": outcome.view.trained_tokens,
        "restores": outcome.view.restores,
        "generated_tokens": outcome.view.generation.total,
        "generated_during_steps": outcome.view.generation.during_steps,
    }
