"""Relay processes on one machine for `benchmarks.relay`: a store and a core each, and the publisher beside them."""

import asyncio
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.machines import Machines
from laminar.allocator import keep_freed_memory
from laminar.experience.server import EmbeddedServer
from laminar.plugins import resolve
from laminar.types import WeightVersion
from relay.link import Credentials
from relay.publisher import Publisher
from relay.role import KEPT_PIECES_BYTES
from relay.server import Chained, Relay
from relay.store import VersionStore
from relay.transports.base import TRANSPORTS, Transport
from relay.transports.shaped import ShapedTransport

HEARTBEAT_SECONDS = 0.2
DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.002


class Chain:
    """A master and so many relays behind it, in processes; the trainer's publisher is in this one.

    Args:
        root: a memory-backed folder.
        tensors: of the model.
        num_relays: besides the master's.
    """

    def __init__(self, root: Path, tensors: list[tuple[str, torch.Tensor]], num_relays: int) -> None:
        self._tensors, self._number = tensors, 0
        self.stores = [open_node(root, index) for index in range(num_relays + 1)]
        model_files = root / "model"
        model_files.mkdir()
        (model_files / "config.json").write_text("{}")
        self._publisher = Publisher(self.stores[0], model_files)

    def publish(self) -> float:
        """Publish one more version; returns the stall in seconds."""
        self._number += 1
        while True:
            started = time.perf_counter()
            report = self._publisher.publish(WeightVersion(0, self._number), self._tensors, until="copied")
            if not report.skipped:
                return time.perf_counter() - started
            time.sleep(POLL_SECONDS)  # both slots are under way: only where publishes follow each other at once

    def wait(self) -> float:
        """Wait until every store has the newest version; returns the seconds."""
        started, version = time.perf_counter(), WeightVersion(0, self._number)
        while any(store.newest() != version for store in reversed(self.stores)):  # the last one first: fewer looks
            if time.perf_counter() - started > DEADLINE_SECONDS:
                raise TimeoutError(f"version {version} did not reach all relays")
            time.sleep(POLL_SECONDS)
        return time.perf_counter() - started

    def close(self) -> None:
        """Stop publishing."""
        self._publisher.close()


def open_node(root: Path, index: int) -> VersionStore:
    """The store of one simulated machine."""
    folder = root / f"node{index}"
    folder.mkdir(exist_ok=True)
    return VersionStore(folder, "bench", f"node{index}")


@contextmanager
def running_chain(
    tensors: list[tuple[str, torch.Tensor]],
    num_relays: int,
    *,
    transport: str = "zmq",
    bytes_per_second: float | None = None,
    machines: Machines | None = None,
) -> Iterator[Chain]:
    """A chain whose first version has reached all; slots are allocated by then, and the piece length is chosen.

    Args:
        tensors: of the model.
        num_relays: besides the master's.
        transport: name of it; `zmq` sends everything by TCP, `auto` shares memory where it can.
        bytes_per_second: limit of each relay's sending.
        machines: where the relays run, one each; None: all here.
    """
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as data,
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        EmbeddedServer(Path(data)) as server,
    ):
        root = Path(folder)
        nodes = [
            context.Process(
                target=run_node, args=(root, server.url, index, transport, bytes_per_second, machines), daemon=True
            )
            for index in range(num_relays + 1)
        ]
        for node in nodes:
            node.start()
        chain = Chain(root, tensors, num_relays)
        try:
            chain.publish()
            chain.wait()
            time.sleep(3 * HEARTBEAT_SECONDS)  # the measured constants travel with the heartbeats
            yield chain
        finally:
            chain.close()
            for node in nodes:
                node.kill()
                node.join()


def run_node(
    root: Path, redis_url: str, index: int, transport: str, bytes_per_second: float | None, machines: Machines | None
) -> None:
    """One relay's process."""
    if machines is not None:
        machines.enter(index)
    host = "127.0.0.1" if machines is None else machines.host(index)
    logging.getLogger("laminar").setLevel(
        logging.ERROR
    )  # that relays end while others follow them is the end of a measurement
    keep_freed_memory(KEPT_PIECES_BYTES)
    os.sched_setaffinity(0, {index % (os.cpu_count() or 1)})
    edges: Transport = resolve(transport, TRANSPORTS)(host)
    if bytes_per_second:
        edges = ShapedTransport(edges, bytes_per_second=bytes_per_second)
    asyncio.run(_run(root, redis_url, index, edges))


async def _run(root: Path, redis_url: str, index: int, edges: Transport) -> None:
    store = open_node(root, index)
    chained = Chained(edges, Credentials("bench", store.node_id, "token"), is_master=index == 0)
    relay = Relay(store, redis_url, chained, heartbeat_seconds=HEARTBEAT_SECONDS)
    await relay.start()
    await relay.run()
