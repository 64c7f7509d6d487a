"""A rollout tier of many replicas on two cores: real workers, manager, relay, trainer loop and Redis; emulated engines.

Workers, manager and trainer share this process, the engines another (`emulated_host`), or each has a process of its own, as
in a run. What a role costs is told apart by its context (`cpu_by_role`). Used by the rollout benchmarks.
"""

import asyncio
import contextlib
import contextvars
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laminar.cluster.data import RunData
from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.errors import EngineError
from laminar.experience.answers import Counters
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.server import EmbeddedServer
from laminar.experience.store import ExperienceStore
from laminar.types import ClaimedGroup, Prompt, Purpose, Trajectory, WeightVersion
from relay.puller import open_puller
from relay.role import RelayRole
from relay.store import open_store
from rollout.engine_handle import EngineHandle
from rollout.engines.client import EngineClient
from rollout.generation import Generator
from rollout.journal import Journal
from rollout.manager import RolloutManager
from rollout.player import Player
from rollout.replica import Replica
from rollout.seat import Seat
from rollout.start_engine import engine_starter
from rollout.worker import RolloutWorker
from trainer.worker import TrainerRank

TOKEN = "benchmark"
NODE = "bench"
FILL_SECONDS = 60.0
ROLE: contextvars.ContextVar[str] = contextvars.ContextVar("role", default="benchmark")
"""Whose work the event loop is doing."""


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
    """Keeps the time that each trajectory was generated for, and the seats of those that are being played."""

    def __init__(self, config: LaminarConfig, worker: str) -> None:
        super().__init__(config, worker)
        self.seconds: dict[str, float] = {}
        self.seats: set[Seat] = set()
        self.on_end: Callable[[Trajectory, Generator], None] = lambda trajectory, engine: None
        self.around: Callable[[Generator], Generator] = lambda engine: engine

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
        assert isinstance(engine, Seat)
        self.seats.add(engine)
        try:
            around = self.around(engine)
            trajectory = await super().play(around, group, member, attempt, purpose, journal)
        finally:
            self.seats.discard(engine)
        self.seconds[trajectory.trajectory_id] = trajectory.timings.generate_seconds
        self.on_end(trajectory, around)
        return trajectory


@dataclass(slots=True)
class Fleet:
    """A running tier; `host` is None where each engine has a process of its own."""

    run_id: str
    redis_url: str
    buffer: ExperienceBuffer
    host: EngineHost | None
    workers: list[RolloutWorker] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    players: list[WatchedPlayer] = field(default_factory=list)
    handles: dict[int, EngineHandle] = field(default_factory=dict)
    manager: RolloutManager | None = None
    roles: "list[asyncio.Task[Any]]" = field(default_factory=list)

    def check(self) -> None:
        """Raise what a role died of, if one did, or that this machine cannot keep up.

        Raises:
            EngineError: an engine was restarted, because it did not answer in time.
        """
        for role in self.roles:
            if role.done() and not role.cancelled() and (error := role.exception()) is not None:
                raise error
        if restarts := sum(replica.restarts for replica in self.replicas):
            raise EngineError(f"{restarts} engine restarts: this machine does not keep up; take a smaller time factor")

    def latencies(self) -> dict[str, float]:
        """Seconds that each ended trajectory was generated for."""
        return {name: seconds for player in self.players for name, seconds in player.seconds.items()}

    async def wait_full(self, num_requests: int) -> None:
        """Until the engines of the one host run most of so many requests; a busy machine takes long to start a fleet."""
        assert self.host is not None
        async with asyncio.timeout(FILL_SECONDS):
            while (await self.host.ask(ask=True))["running"] < 0.9 * num_requests:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def counters(self) -> Counters:
        """Where all admitted trajectories stand."""
        return await self.buffer.counters()


@contextlib.asynccontextmanager
async def running_fleet(
    config: LaminarConfig, folder: Path, run_id: str, engine_flags: dict[str, object] | None, prompt_tokens: int = 3
) -> AsyncIterator[Fleet]:
    """Start everything, with the trainer publishing, until the block ends.

    Args:
        config: the run.
        folder: of the run, new.
        run_id: its name.
        engine_flags: of the engines in the one process that they share; None: each has its own, as the config says.
        prompt_tokens: of every prompt, 3 or more; the tiny model's tokens are characters.
    """
    await asyncio.to_thread(folder.mkdir, parents=True)
    await asyncio.to_thread((folder / "logs").mkdir)
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(folder / "redis"))
        client = await connect(server.url)
        stack.push_async_callback(client.aclose)
        prompts = [Prompt(str(i), f"{i % 10}{i // 10 % 10}>".rjust(prompt_tokens, "7"), {"digit": "1"}) for i in range(2000)]
        await RunData(prompts, []).put_into_pool(client, run_id, config)
        context = RoleContext("relay-0", run_id, TOKEN, server.url, folder, NODE)
        host = None if engine_flags is None else await _start_host(stack, run_id, folder, config, engine_flags)
        group = await stack.enter_async_context(_Roles())
        relay = RelayRole(context, config)
        await as_role("relay", relay.start())
        stack.callback(lambda: open_store(config, run_id, NODE).remove())
        group.run("relay", relay)
        trainer = TrainerRank(_named(context, "trainer-0"), config, rank=0, meeting="")
        await as_role("trainer", trainer.start())
        await as_role("trainer", trainer.restore())
        fleet = Fleet(run_id, context.redis_url, ExperienceBuffer(ExperienceStore(client, run_id)), host)
        for index in range(config.rollout.num_workers):
            await as_role("worker", _equip(fleet, _named(context, f"rollout-{index}"), config))
        for worker in fleet.workers:
            group.run("worker", worker)
        group.run("trainer", trainer)
        if config.rollout.wants_manager(config.rollout.num_workers):
            fleet.manager = RolloutManager(_named(context, "manager"), config)
            await as_role("manager", fleet.manager.start())
            group.run("manager", fleet.manager)
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

    def run(self, name: str, role: Any) -> None:
        self.tasks.append(as_role(name, role.run()))


@contextlib.contextmanager
def cpu_by_role() -> Iterator[Counter[str]]:
    """CPU seconds of this thread by the role whose callbacks, its sockets' included, the event loop ran.

    Callbacks inherit the context of whoever made the task, timer or socket, so it is enough to name each role once. What a
    role hands to other threads (a publish, a spool) is not in it.
    """
    spent: Counter[str] = Counter()
    plain = asyncio.Handle._run

    def metered(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        plain(handle)
        spent[handle._context.get(ROLE, "benchmark")] += time.thread_time() - started

    asyncio.Handle._run = metered  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        asyncio.Handle._run = plain  # type: ignore[method-assign]


def as_role(role: str, work: "Coroutine[Any, Any, Any]") -> "asyncio.Task[Any]":
    """Run something under a role's name."""
    context = contextvars.copy_context()
    context.run(ROLE.set, role)
    return asyncio.create_task(work, context=context)


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


async def _equip(fleet: Fleet, role: RoleContext, config: LaminarConfig) -> None:
    """Make one worker and start its engine."""
    index, host = len(fleet.workers), fleet.host
    started = engine_starter(role, config)

    async def start_engine(path: Path, version: WeightVersion) -> tuple[EngineHandle, EngineClient]:
        if host is None:
            handle, client = await started(path, version)
        else:
            answer = await host.ask(start=str(path), version=str(version))
            client = EngineClient(answer["url"], token=TOKEN, run_id=role.run_id, version=version)
            handle = Handle(host, answer["number"])
        fleet.handles[index] = handle
        return handle, client

    puller = open_puller(config.relay, role.run_id, NODE)
    replica = Replica(config.rollout.engine, puller, start_engine)
    player = WatchedPlayer(config, role.role)
    worker = RolloutWorker(role, config)
    await worker.equip(await connect(role.redis_url), player, puller, replica)
    fleet.workers.append(worker)
    fleet.replicas.append(replica)
    fleet.players.append(player)


async def one(prompt: Prompt, completion: str) -> float:
    """A reward that costs nothing: awaited, no thread."""
    return 1.0


def cpu_seconds() -> float:
    """CPU time of this process."""
    return time.process_time()
