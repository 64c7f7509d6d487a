"""What the command lines of our engines share: where to listen, whom to obey, when to end.

The bound port is written to `--ready-fd` as one JSON line; with `--lifeline` the process ends when its parent does.
This module knows no engine, and no torch.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from laminar.errors import ConfigError, EngineError
from rollout.engines.door import EngineDoor
from rollout.engines.lifeline import die_with_parent
from rollout.engines.routes import EngineServer, listening

TOKEN_VARIABLE = "LAMINAR_ENGINE_TOKEN"

MakeDoor = Callable[[argparse.Namespace, Callable[[BaseException], None]], EngineDoor]
"""Starts the engine in the running event loop; the second argument is called if it dies of a bug."""


def engine_parser(program: str) -> argparse.ArgumentParser:
    """The flags that every engine of ours takes."""
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="HF checkpoint folder")
    parser.add_argument("--weight-version", required=True, help="name of its weights, such as 0.0")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument(
        "--token", default=os.environ.get(TOKEN_VARIABLE, ""), help=f"bearer token; default: ${TOKEN_VARIABLE}"
    )
    parser.add_argument("--run-id", default="", help="the run that may change the weights")
    parser.add_argument("--max-running", type=int, default=64, help="requests decoded at once")
    parser.add_argument("--max-cached-tokens", type=int, default=65536, help="capacity of the key-value store")
    parser.add_argument("--max-prefill-tokens", type=int, default=4096, help="tokens prefilled in one step")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--ready-fd", type=int, default=-1, help="descriptor that gets one JSON line once the port is bound")
    parser.add_argument("--lifeline", action="store_true", help="end with the parent, or when standard input ends")
    return parser


def run_engine(options: argparse.Namespace, make_door: MakeDoor) -> int:
    """Serve until the engine dies; returns the exit code."""
    if options.lifeline:
        die_with_parent()
    if not options.token:
        print(f"error: set ${TOKEN_VARIABLE} or --token; an engine without a token would obey anybody", file=sys.stderr)
        return ConfigError.exit_code
    try:
        asyncio.run(_serve(options, make_door))
    except (ConfigError, EngineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


async def _serve(options: argparse.Namespace, make_door: MakeDoor) -> None:
    """Bind, announce the port, and serve until the engine dies of a bug."""
    crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    server = EngineServer(make_door(options, crashed.set_exception), token=options.token, run_id=options.run_id)
    async with listening(server, options.host, options.port) as url:
        announce(options.ready_fd, url)
        await crashed


def announce(descriptor: int, url: str) -> None:
    """Tell the parent where we listen."""
    line = json.dumps({"url": url, "pid": os.getpid()})
    print(f"listening: {line}", file=sys.stderr, flush=True)
    if descriptor >= 0:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(line + "\n")
