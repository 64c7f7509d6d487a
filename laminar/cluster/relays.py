"""The relays of a run: one on every machine that trains or runs engines, the master where trainer rank 0 is.

Invariants: a relay is placed on its machine and nowhere else, and shares no fate with engines; exactly one is master, and no
other relay starts before it is known; the trainer publishes only once the relay of its machine is the master; a machine that
left the cluster takes its relay along and nothing else.
Does not know weights, or how relays find each other (`relay.directory`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from laminar.cluster.ray_cluster import RoleProcess, living_nodes
from laminar.cluster.roles import RoleSpec, relay_spec
from laminar.errors import DeadlineError, LaminarError

logger = logging.getLogger("laminar.supervisor")

START_SECONDS = 60.0
LEAD_SECONDS = 150.0
"""Deadline for the machine of trainer rank 0 to have a master relay: one to stop, to be placed and to start."""

NODE_SECONDS = 2.0
"""Ray takes a moment to learn that a machine is gone, whose processes it misses at once."""

Life = Callable[[], Coroutine[Any, Any, None]]


class Relays:
    """Starts, keeps and stops relays.

    Args:
        keep: runs lives of a role until one returns in order, within the run's budget of restarts.
        new_process: makes a process of a role.
        start: places and starts it, by a deadline in seconds.
        num_gpus: that Ray sets aside for each.
    """

    def __init__(
        self,
        keep: Callable[[str, Life], Awaitable[None]],
        new_process: Callable[[RoleSpec], RoleProcess],
        start: Callable[[RoleProcess, float], Awaitable[None]],
        num_gpus: float = 0,
    ) -> None:
        self._keep, self._new_process, self._start, self._num_gpus = keep, new_process, start, num_gpus
        self._nodes: list[str] = []
        """Machines that need a relay, in the order in which that became known; the place is the relay's number."""
        self._kept: set[str] = set()
        self._running: dict[str, tuple[RoleProcess, bool]] = {}
        """Relays that have started, and whether as master."""
        self._master = ""
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Keep a relay on every machine that needs one, until cancelled. With one machine its relay is started at once."""
        nodes = living_nodes()
        if len(nodes) == 1:
            self._nodes, self._master = [*nodes], nodes[0]
        async with asyncio.TaskGroup() as group:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: bool(self._master and set(self._nodes) - self._kept))
                    new = [node for node in self._nodes if node not in self._kept]
                for node in new:
                    self._kept.add(node)
                    group.create_task(self._keep_one(node))

    async def need(self, node_id: str) -> None:
        """From now on this machine has a relay; returns at once."""
        async with self._changed:
            if node_id not in self._nodes:
                self._nodes.append(node_id)
            self._changed.notify_all()

    async def lead(self, node_id: str) -> None:
        """Make this machine's relay the master, and wait until it runs; a relay that was master becomes a hop.

        Raises:
            DeadlineError: it does not in time.
        """
        self._master = node_id
        for node, (process, was_master) in list(self._running.items()):
            if was_master != (node == node_id):
                await self._end(process)
        await self.need(node_id)
        try:
            async with asyncio.timeout(LEAD_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._running.get(node_id, (None, False))[1])
        except TimeoutError:
            raise DeadlineError("the master relay to start beside trainer rank 0", LEAD_SECONDS) from None

    def processes(self) -> list[RoleProcess]:
        """Relays that run."""
        return [process for process, _ in self._running.values()]

    async def _keep_one(self, node_id: str) -> None:
        await self._keep(f"relay-{self._nodes.index(node_id)}", lambda: self._live(node_id))
        self._kept.discard(node_id)
        if node_id in self._nodes and node_id not in living_nodes():
            self._nodes.remove(node_id)

    async def _live(self, node_id: str) -> None:
        """One life after another, as often as the relay changes between master and hop."""
        while node_id in living_nodes():
            is_master = node_id == self._master
            spec = relay_spec(self._nodes.index(node_id), node_id, is_master=is_master, num_gpus=self._num_gpus)
            process = self._new_process(spec)
            try:
                await self._start(process, START_SECONDS)
                async with self._changed:
                    self._running[node_id] = (process, is_master)
                    self._changed.notify_all()
                await process.call("run")
            except LaminarError:
                if len(living_nodes()) > 1:
                    await asyncio.sleep(NODE_SECONDS)
                if node_id in living_nodes():
                    raise
                logger.warning("machine %s left the cluster, and its relay with it", node_id[:12])
                return
            finally:
                self._running.pop(node_id, None)
                process.kill()
            if is_master == (node_id == self._master):
                return  # told to stop

    async def _end(self, process: RoleProcess) -> None:
        try:
            await process.call("stop")
        except LaminarError as error:
            logger.info("stopping %s: %s", process.spec.name, error)  # dead already
