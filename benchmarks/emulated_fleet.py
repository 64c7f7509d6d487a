"""A rollout tier of many replicas on two cores: real workers, manager, relay, trainer loop and Redis; emulated engines.

Workers, manager and trainer share this process, the engines another (`emulated_host`). Used by the rollout benchmarks.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.cluster.data import RunData
from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.errors import EngineError
from laminar.experience.client import connect
from laminar.experience.server import EmbeddedServer
from laminar.types import ClaimedGroup, Prompt, Purpose, Trajectory, WeightVersion
from relay.puller import open_puller
from relay.role import RelayRole
from relay.store import open_store
from rollout.engines.client import EngineClient
from rollout.generation import Generator
from rollout.journal import Journal
from rollout.manager import RolloutManager
from rollout.player import Player
from rollout.replica import Replica
from rollout.worker import RolloutWorker
from trainer.worker import TrainerRank

TOKEN = "benchmark"
NODE = "bench"


class EngineHost:
    """The process with the engines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._lock = process, asyncio.Lock()

    async def ask(self, **command: Any) -> dict[str, Any]:
        """One line there, one back; a caller that is cancelled leaves no answer behind for the next one."""
        return await asyncio.shield(asyncio.ensure_future(self._exchange(command)))

    async def _exchange(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._lock:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            line = await self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line or b"{}")  # at the end the host may go before a worker's last question
        return answer


@dataclass(slots=True)
class Handle:
    """One engine of the host, as a replica sees it."""

    host: EngineHost
    number: int
    returncode: int | None = None

    async def kill(self) -> None:
        """End it."""
        if self.returncode is None:
            self.returncode = -9
            await self.host.ask(kill=self.number)


class WatchedPlayer(Player):
    """Keeps the time that each trajectory was generated for."""

    def __init__(self, config: LaminarConfig, worker: str) -> None:
        super().__init__(config, worker)
        self.seconds: list[float] = []

    async def play(
        self,
        engine: Generator,
        group: ClaimedGroup,
        member: int,
        attempt: int,
        purpose: Purpose,
        journal: Journal | None = None,
    ) -> Trajectory:
        """As any player."""
        trajectory = await super().play(engine, group, member, attempt, purpose, journal)
        self.seconds.append(trajectory.timings.generate_seconds)
        return trajectory


@dataclass(slots=True)
class Fleet:
    """A running tier."""

    run_id: str
    redis_url: str
    host: EngineHost
    workers: list[RolloutWorker]
    replicas: list[Replica]
    players: list[WatchedPlayer]
    manager: RolloutManager | None
    roles: list["asyncio.Task[Any]"]

    def check(self) -> None:
        """Raise what a role died of, if one did, or that this machine cannot keep up.

        Raises:
            EngineError: an engine was restarted, because it did not answer in time.
        """
        for role in self.roles:
            if role.done() and not role.cancelled() and (error := role.exception()) is not None:
                raise error
        if restarts := sum(replica.restarts for replica in self.replicas):
            raise EngineError(f"{restarts} engines were restarted: the machine does not keep up; take a smaller time factor")

    def latencies(self) -> list[float]:
        """Seconds that ended trajectories were generated for."""
        return [seconds for player in self.players for seconds in player.seconds]


@contextlib.asynccontextmanager
async def running_fleet(
    config: LaminarConfig, folder: Path, run_id: str, engine_flags: dict[str, object]
) -> AsyncIterator[Fleet]:
    """Start everything, with the trainer publishing, until the block ends."""
    await asyncio.to_thread(folder.mkdir, parents=True)
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(folder / "redis"))
        client = await connect(server.url)
        stack.push_async_callback(client.aclose)
        prompts = [Prompt(str(i), f"{i % 10}{i // 10 % 10}>", {"digit": "1"}) for i in range(2000)]
        await RunData(prompts, []).put_into_pool(client, run_id, config)
        context = RoleContext("relay-0", run_id, TOKEN, server.url, folder, NODE)
        host = await _start_host(stack, run_id, folder, config, engine_flags)
        group = await stack.enter_async_context(_Roles())
        relay = RelayRole(context, config)
        await relay.start()
        stack.callback(lambda: open_store(config, run_id, NODE).remove())
        await group.run(relay)
        trainer = TrainerRank(_named(context, "trainer-0"), config, rank=0, meeting="")
        await trainer.start()
        await trainer.restore()
        fleet = await _start_workers(context, config, host)
        for worker in fleet.workers:
            await group.run(worker)
        await group.run(trainer)
        if config.rollout.wants_manager:
            fleet.manager = RolloutManager(_named(context, "manager"), config)
            await fleet.manager.start()
            await group.run(fleet.manager)
        fleet.roles = group.tasks
        yield fleet


class _Roles:
    """Roles that run until the block ends, and are then ended without ceremony."""

    async def __aenter__(self) -> "_Roles":
        self.tasks: list[asyncio.Task[Any]] = []
        return self

    async def __aexit__(self, *error: object) -> None:
        while pending := [task for task in self.tasks if not task.done()]:
            for task in pending:  # again and again: a Redis client that connects anew may swallow a cancellation
                task.cancel()
            await asyncio.wait(pending, timeout=1.0)
        for task in self.tasks:
            if not task.cancelled() and task.exception() is not None:
                print(f"a role failed: {task.exception()!r}", file=sys.stderr)

    async def run(self, role: Any) -> None:
        self.tasks.append(asyncio.create_task(role.run()))


def _named(context: RoleContext, role: str) -> RoleContext:
    return RoleContext(role, context.run_id, TOKEN, context.redis_url, context.run_folder, NODE)


async def _start_host(
    stack: AsyncExitStack, run_id: str, folder: Path, config: LaminarConfig, engine_flags: dict[str, object]
) -> EngineHost:
    engine = config.rollout.engine
    flags: dict[str, object] = {
        "model": config.model.path, "weight-version": "0.0", "token": TOKEN, "run-id": run_id,
        "max-running": engine.max_running, "max-cached-tokens": engine.max_cached_tokens, **engine_flags,
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.emulated_host", *(f"--{name}={value}" for name, value in flags.items()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=(folder / "host.log").open("ab"),
        env={**os.environ, "OMP_NUM_THREADS": "1"}, limit=1 << 20,
    )  # fmt: skip

    async def end() -> None:
        process.kill()
        await process.wait()

    stack.push_async_callback(end)
    return EngineHost(process)


async def _start_workers(context: RoleContext, config: LaminarConfig, host: EngineHost) -> Fleet:
    fleet = Fleet(context.run_id, context.redis_url, host, [], [], [], None, [])

    async def start_engine(path: Path, version: WeightVersion) -> tuple[Handle, EngineClient]:
        answer = await host.ask(start=str(path), version=str(version))
        client = EngineClient(answer["url"], token=TOKEN, run_id=context.run_id, version=version)
        return Handle(host, answer["number"]), client

    for index in range(config.rollout.num_workers):
        role = _named(context, f"rollout-{index}")
        puller = open_puller(config.relay, context.run_id, NODE)
        replica = Replica(config.rollout.engine, puller, start_engine)
        player = WatchedPlayer(config, role.role)
        worker = RolloutWorker(role, config)
        await worker.equip(await connect(context.redis_url), player, puller, replica)
        fleet.workers.append(worker)
        fleet.replicas.append(replica)
        fleet.players.append(player)
    return fleet


async def one(prompt: Prompt, completion: str) -> float:
    """A reward that costs nothing: awaited, no thread."""
    return 1.0


def cpu_seconds() -> float:
    """CPU time of this process."""
    return time.process_time()
