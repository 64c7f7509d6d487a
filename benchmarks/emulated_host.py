"""Many emulated engines in one process of their own: `python -m benchmarks.emulated_host FLAGS`, told what to do by lines.

A line `{"start": FOLDER, "version": TEXT}` starts an engine and is answered by its number and URL; `{"kill": NUMBER}` ends
one; `{"ask": true}` tells tokens, cache use, preemptions and lag of all, and the process's CPU seconds. Ends with its input.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from rollout.engines.emulated_server import EmulatedServer, as_options, parse


class Host:
    """The engines of one process."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        self._servers: list[EmulatedServer] = []

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one line."""
        if "start" in command:
            return await self._start(Path(command["start"]), command["version"])
        if "kill" in command:
            await self._servers[command["kill"]].kill()
            return {}
        loads = [server.engine.load() for server in self._servers if server.returncode is None]
        return {
            "generated_tokens": sum(server.engine.generated_tokens for server in self._servers),
            "used_share": [load.used_tokens / load.capacity_tokens for load in loads],
            "preempted": sum(load.num_retractions for load in loads),
            "running": sum(load.running for load in loads),
            "lag_seconds": max((server.loop.lag_seconds for server in self._servers), default=0.0),
            "cpu_seconds": time.process_time(),
        }

    async def _start(self, folder: Path, version: str) -> dict[str, Any]:
        flags = self._flags
        server = EmulatedServer(
            folder,
            version,
            as_options(flags),
            time_factor=flags.time_factor,
            token=flags.token,
            run_id=flags.run_id,
            stream_interval=flags.stream_interval,
        )
        self._servers.append(server)
        return {"number": len(self._servers) - 1, "url": await server.start()}


async def listen(host: Host) -> None:
    """One answer a line, until the input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await host.obey(json.loads(line))), flush=True)


def main() -> None:
    """Entry point."""
    asyncio.run(listen(Host(parse(sys.argv[1:]))))


if __name__ == "__main__":
    main()
