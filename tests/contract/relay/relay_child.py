"""Forks real relay processes that are killed; run by test_relay_chain_kill.py.

Arguments: folder for the stores, Redis URL, bytes a second of each relay's sending, transport.
Commands on standard input, one a line, answered by one line each:
    start NAME MASTER   fork a relay (MASTER is 0 or 1); answers its pid
    reap PID            wait for a relay that the test has killed; answers its exit status
"""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from laminar.plugins import resolve
from relay.link import Credentials, HopLimits
from relay.server import Chained, Relay
from relay.store import VersionStore
from relay.transports.base import TRANSPORTS
from relay.transports.shaped import ShapedTransport

LIMITS = HopLimits(silence_seconds=2.0, alive_seconds=0.05, stall_seconds=3.0, avoid_seconds=1.0, retry_seconds=0.05)


async def run_relay(root: Path, redis_url: str, name: str, is_master: bool, bytes_per_second: float, kind: str) -> None:
    (root / name).mkdir(exist_ok=True)
    logging.basicConfig(filename=root / name / "relay.log", level=logging.INFO, format="%(asctime)s %(message)s")
    store = VersionStore(root / name, "run", name, mapping_readers=1)
    transport = ShapedTransport(resolve(kind, TRANSPORTS)("127.0.0.1"), bytes_per_second=bytes_per_second)
    chained = Chained(transport, Credentials("run", name, "secret"), is_master, LIMITS)
    relay = Relay(store, redis_url, chained, heartbeat_seconds=0.1, ttl_seconds=1.0)
    await relay.start()
    await relay.run()


def main() -> None:
    root, redis_url, rate, kind = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
    started: list[int] = []
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "reap":
            print(os.waitpid(int(arguments[0]), 0)[1], flush=True)
            started.remove(int(arguments[0]))
            continue
        pid = os.fork()
        if pid == 0:
            asyncio.run(run_relay(root, redis_url, arguments[0], arguments[1] == "1", rate, kind))
            os._exit(0)
        started.append(pid)
        print(pid, flush=True)
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


main()
