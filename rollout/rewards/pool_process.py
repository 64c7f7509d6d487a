"""One process of a pool: `python -m rollout.rewards.pool_process package.module:function SECONDS WARM_UP`.

Reads calls from stdin and answers on stdout, each a frame of 8 bytes length and JSON. It ends when stdin ends; busy in a
library that hears nothing, it is ended by the kernel's CPU limit, so that no dead worker leaves a process behind that burns.
"""

import contextlib
import importlib
import json
import math
import os
import resource
import sys
import threading
from typing import Any, BinaryIO

HEAD_BYTES = 8
"""What tells a frame's length, little end first."""
_SPARE_SECONDS = 2


def serve(function_path: str, seconds: float, warm_up: list[Any] | None, calls: BinaryIO, answers: BinaryIO) -> None:
    """Answer calls until there are no more."""
    module, _, name = function_path.partition(":")
    function = getattr(importlib.import_module(module), name)
    if warm_up is not None:
        function(*warm_up)
    _write(answers, {"value": "ready"})
    while head := calls.read(HEAD_BYTES):
        arguments = json.loads(calls.read(int.from_bytes(head, "little")))
        _limit_cpu(seconds)
        try:
            outcome = {"value": function(*arguments)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary around the checking library
            outcome = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        _write(answers, outcome)


def _write(answers: BinaryIO, outcome: object) -> None:
    body = json.dumps(outcome).encode()
    answers.write(len(body).to_bytes(HEAD_BYTES, "little") + body)
    answers.flush()


def _limit_cpu(seconds: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + _SPARE_SECONDS
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _end_with_parent(parent: int) -> None:
    """A process that sleeps in a library would not see the end of stdin."""
    while os.getppid() == parent:
        threading.Event().wait(1.0)
    os._exit(1)


def main() -> None:
    """Serve on the standard streams; what a library prints goes to stderr."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        serve(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]), sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
