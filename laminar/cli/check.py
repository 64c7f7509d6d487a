"""`laminar check`: is this config right, and does it fit on the machines? Starts nothing."""

import math
from pathlib import Path
from typing import Annotated

import typer

from laminar.config.check import check_config
from laminar.config.load import load_config
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError, EnvironmentSetupError

ConfigArgument = Annotated[Path, typer.Argument(help="TOML config file.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(help="Settings such as trainer.learning_rate=1e-6.", show_default=False)
]
GIGABYTE = 10**9


def check(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Also say who would go where, and whether memory suffices")
    ] = False,
    machines: Annotated[int, typer.Option(min=1, help="With --dry-run: how many machines, all alike")] = 1,
    cores: Annotated[int | None, typer.Option(min=1, help="Of each machine; those of this one")] = None,
    memory_gb: Annotated[float | None, typer.Option(min=1, help="Of each machine; that of this one")] = None,
    shared_gb: Annotated[
        float | None, typer.Option(min=0, help="Shared memory of each; half its memory, or as here")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Of each machine; those of this one")] = None,
    gpu_gb: Annotated[float | None, typer.Option(min=1, help="Memory of each GPU; that of those of this machine")] = None,
) -> None:
    """Judge a config without starting anything: keys, values, sizes, plugins and their options, models and data."""
    loaded = load_config(config, overrides or [])
    notes = check_config(loaded, cores)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{config}: right" + (f", with {len(notes)} notes" if len(notes) > 1 else ", with a note" if notes else ""))
    if dry_run:
        rehearse(loaded, machines, cores, memory_gb, shared_gb, gpus, gpu_gb)


def rehearse(
    config: LaminarConfig,
    num_machines: int,
    cores: int | None,
    memory_gb: float | None,
    shared_gb: float | None,
    gpus: int | None,
    gpu_gb: float | None,
) -> None:
    """Print the plan of a run on machines of this kind.

    Raises:
        ConfigError: a size is no number.
        EnvironmentSetupError: a role finds no room, or a memory is too small.
    """
    for option, size in {"--memory-gb": memory_gb, "--shared-gb": shared_gb, "--gpu-gb": gpu_gb}.items():
        if size is not None and not math.isfinite(size):
            raise ConfigError(f"{option} {size}: give a number of gigabytes, such as 80")
    from laminar.dry_run.machines import described_machine, this_machine
    from laminar.dry_run.model import read_model
    from laminar.dry_run.plan import describe, make_plan

    here = this_machine(Path(config.relay.root))
    machine = described_machine(here, cores, memory_gb, shared_gb, gpus, gpu_gb)
    plan = make_plan(config, [machine] * num_machines, read_model(config))
    typer.echo("\n" + describe(plan, config))
    if faults := plan.faults():
        raise EnvironmentSetupError("the run does not fit: " + "\n  ".join(faults))
