"""SGLang as a Laminar engine: run by SGLang's own interpreter, as a file, since Laminar is not installed there.

    PYTHON sglang_launch.py --ready-fd 5 -- --model-path=... (any flags of SGLang 0.5.23)

It adds what `sglang.launch_server` lacks: a free port that is kept while the model loads, one JSON line to `--ready-fd` once
the warm-up request was answered, the token from the environment instead of the command line, and an end with its parent.
The server and its children stay in our process group; SGLang ties its children's lives to ours. The module is imported
again by every child, so it imports nothing heavy. It does not know Laminar's config.
"""

import argparse
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

TOKEN_VARIABLE = "LAMINAR_ENGINE_TOKEN"
HEALTH_POLL_SECONDS = 0.2
REQUEST_SECONDS = 5.0


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="sglang_launch.py", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--ready-fd", type=int, required=True, help="descriptor that gets one JSON line once requests are served"
    )
    parser.add_argument("--weights-request", default="", help="file that names the slot which ranks load by themselves")
    parser.add_argument("flags", nargs="*", help="flags of sglang.launch_server, after --")
    options = parser.parse_args()
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        sys.exit(f"error: set ${TOKEN_VARIABLE}; an engine without a token would obey anybody")
    if options.weights_request:
        let_ranks_load(options.weights_request)
    sibling("lifeline").die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run is stopped by its supervisor, which ends engines last
    with reserve_port(options.host) as reservation:
        url = f"http://{options.host}:{reservation.getsockname()[1]}"
        threading.Thread(target=announce_when_healthy, args=(options.ready_fd, url), name="announce", daemon=True).start()
        serve([*options.flags, f"--host={options.host}", f"--port={reservation.getsockname()[1]}"], token)


def sibling(name: str) -> ModuleType:
    """A module beside this file, loaded by its path: our folder must not join the import path of SGLang."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"{name}.py must lie beside {__file__}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def let_ranks_load(request: str) -> None:
    """Give the ranks, which are processes of their own, our loader and where it learns what to load."""
    folder = str(Path(__file__).with_name("ranks"))
    os.environ["LAMINAR_WEIGHTS_REQUEST"] = request
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
    sys.path.append(folder)


def reserve_port(host: str) -> socket.socket:
    """A free port that nobody is given while the model loads, yet SGLang can bind.

    Both sockets set SO_REUSEADDR and only SGLang's listens, which Linux allows; other programs that ask for any free port
    do not get this one.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((host, 0))
    return reservation


def announce_when_healthy(descriptor: int, url: str) -> None:
    """Write the line when `/health` answers 200: SGLang answers 503 until its warm-up request has come through."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=REQUEST_SECONDS):
                break
        except (urllib.error.URLError, OSError):  # not listening yet, or 503; our starter has the deadline
            time.sleep(HEALTH_POLL_SECONDS)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(json.dumps({"url": url, "pid": os.getpid()}) + "\n")


def serve(flags: list[str], token: str) -> None:
    """What `python -m sglang.launch_server` does, with the token added where no process list shows it."""
    # `/health` must answer during a pause too; a dead child ends the whole server, so there is no need to sample a token
    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    os.environ.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)  # the trainer wants log-probs at the sampling temperature
    if "--device=cpu" in flags:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if importlib.util.find_spec("sglang") is None:
        sys.exit(
            f"error: {sys.executable} has no SGLang; run `make sglang` and name that interpreter in rollout.engine.python"
        )
    keep_out_of_logs(token)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args([*flags, f"--api-key={token}"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def keep_out_of_logs(secret: str) -> None:
    """SGLang logs all its arguments, the token among them."""
    make_record = logging.getLogRecordFactory()

    def make_clean_record(*arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = make_record(*arguments, **keywords)
        text = record.getMessage()
        if secret in text:
            record.msg, record.args = text.replace(secret, "(secret)"), ()
        return record

    logging.setLogRecordFactory(make_clean_record)


if __name__ == "__main__":
    main()
