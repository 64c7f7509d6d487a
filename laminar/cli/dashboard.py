"""`laminar dashboard`: a page on a run, live or finished."""

from pathlib import Path
from typing import Annotated

import typer

from laminar.cli.control import RunArgument
from laminar.run_folder import RunFolder


def dashboard(
    run: RunArgument,
    host: Annotated[str, typer.Option(help="Address to bind; anything but loopback lets others read the run")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port")] = 0,
    token: Annotated[bool, typer.Option("--token", help="Print the token that lets the page control the run")] = False,
    descriptor: Annotated[int, typer.Option(hidden=True, help="A listening socket that was inherited")] = -1,
) -> None:
    """Serve a page on a run until Ctrl-C."""
    import socket

    from laminar.dashboard.address import allowed_hosts, bind, url_of
    from laminar.dashboard.app import make_app
    from laminar.dashboard.serve import serve
    from laminar.dashboard.source import RunSource

    folder = RunFolder.open(Path(run))
    listening = bind(host, port) if descriptor < 0 else socket.socket(fileno=descriptor)
    typer.echo(f"dashboard of {folder.path.name}: {url_of(listening)}")
    if token:
        typer.echo(f"token: {folder.read_state().token}")
    serve(make_app(RunSource(folder), allowed_hosts(host)), listening)
