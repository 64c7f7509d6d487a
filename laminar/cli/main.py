"""`laminar`: asynchronous RL post-training. Errors are one sentence, exit codes mean something.

Exit codes: 0 done, 1 error, 2 a setting, file or row to mend, 3 the machine lacks something, 4 the run gave up,
5 the run is not alive or does not answer, 130 stopped.
"""

import sys

import typer

from laminar.cli import check as check_command
from laminar.cli import control as control_commands
from laminar.cli import dashboard as dashboard_command
from laminar.cli import doctor as doctor_command
from laminar.cli import evaluate as evaluate_command
from laminar.cli import explain as explain_command
from laminar.cli import export as export_command
from laminar.cli import logs as logs_command
from laminar.cli import report as report_command
from laminar.cli import run as run_commands
from laminar.cli import scale as scale_command
from laminar.cli import show as show_command
from laminar.cli import simulate as simulate_command
from laminar.cli import status as status_command
from laminar.cli import train as train_command
from laminar.errors import LaminarError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__.splitlines()[0], pretty_exceptions_enable=False)
app.command(name="run")(run_commands.run)
app.command(name="resume")(run_commands.resume)
app.command(name="status")(status_command.status)
app.command(name="stop")(control_commands.stop)
app.command(name="pause")(control_commands.pause)
app.command(name="unpause")(control_commands.unpause)
app.command(name="set")(control_commands.set_value)
app.command(name="logs")(logs_command.logs)
app.command(name="dashboard")(dashboard_command.dashboard)
app.command(name="show")(show_command.show)
app.command(name="report")(report_command.report)
app.command(name="doctor")(doctor_command.doctor)
app.command(name="scale")(scale_command.scale)
app.command(name="train")(train_command.train)
app.command(name="eval")(evaluate_command.evaluate)
app.command(name="export")(export_command.export)
app.command(name="check")(check_command.check)
app.command(name="explain")(explain_command.explain)
app.command(name="simulate")(simulate_command.simulate)


def main() -> None:
    """Entry point of the `laminar` command."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        check_packages()
        app(standalone_mode=True)
    except LaminarError as error:
        if debug:
            raise
        typer.secho(f"laminar: {error}", fg="red", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def check_packages() -> None:
    """Refuse to start if `relay`, `rollout` or `trainer` would come from somewhere else.

    The names are generic: a user's own `trainer/` folder could shadow ours.

    Raises:
        ConfigError: naming the intruder.
    """
    import importlib.util
    from pathlib import Path

    from laminar.errors import ConfigError

    home = Path(__file__).resolve().parents[2]
    for name in ("relay", "rollout", "trainer"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or origin.parents[1] != home:
            raise ConfigError(
                f"the package {name!r} is found at {origin or 'no file'}, not beside laminar in {home}; "
                "run from another folder, or rename yours"
            )


if __name__ == "__main__":
    main()
