"""Edges by Mooncake's transfer engine: heads over ZeroMQ, bodies read by the receiver out of the sender's registered memory.

RDMA where the machine has devices for it, TCP elsewhere, through the same code. Both ends copy once: bodies are staged in
buffers that are registered once and kept (registering pins pages, too slow for every piece), two for sending and one for
receiving on each edge, each as long as the longest body.

Invariants: a staged body is overwritten only after the other end has said that it took it; a body that nobody wants is not
read; memory is registered for as long as its edge lives, and a read of anything else is refused by the engine.
Does not know what messages mean. Whoever can reach the port may read what is staged: it belongs on a cluster's own network.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from laminar.errors import EnvironmentSetupError
from relay.transports.base import Connection, Handler, LinkLostError, Place, Received, nowhere, unpack
from relay.transports.zmq_tcp import ZmqTransport

STEP_SECONDS = 6
"""Deadline for one body to pass."""

RDMA_DEVICES = Path("/sys/class/infiniband")
NUM_STAGED = 2
"""One is filled while the other is read."""

_PLAIN, _WITH_BODY, _TAKEN = b"\0", b"\1", b"\2"
_MAX_FRAMES = 1024


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """A message whose body can be read.

    Attributes:
        buffer: in which staging buffer of the sender it lies.
        address: of that.
        num_bytes: its length.
        name: the sender's, in the engine.
        head: of the message.
    """

    buffer: Annotated[int, msgspec.Meta(ge=0, lt=NUM_STAGED)]
    address: Annotated[int, msgspec.Meta(ge=0)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]
    name: str
    head: bytes


class MooncakeTransport:
    """Edges of one process.

    Args:
        host: address of the network card that others reach this machine by.

    Raises:
        EnvironmentSetupError: Mooncake is not installed, a system library is missing, or it finds no network.
    """

    def __init__(self, host: str) -> None:
        self._engine = _open_engine(host)
        self._heads = ZmqTransport(host)
        self._name = f"{host}:{self._engine.get_rpc_port()}"

    async def start(self) -> str:
        """As ZeroMQ's."""
        return await self._heads.start()

    async def serve(self, handle: Handler) -> None:
        """Run `handle` for everybody who connects, until cancelled."""

        async def handle_edge(heads: Connection) -> None:
            edge = MooncakeConnection(heads, self._engine, self._name)
            try:
                await handle(edge)
            finally:
                await edge.close()

        await self._heads.serve(handle_edge)

    async def connect(self, address: str) -> "MooncakeConnection":
        """An edge to `address`, as ZeroMQ's."""
        return MooncakeConnection(await self._heads.connect(address), self._engine, self._name)

    async def close(self) -> None:
        """End all edges."""
        await self._heads.close()


class MooncakeConnection:
    """One end of an edge.

    Args:
        heads: carries the heads.
        engine: of the process.
        name: what other engines call it.
    """

    def __init__(self, heads: Connection, engine: Any, name: str) -> None:
        self._heads, self._engine, self._name = heads, engine, name
        self._thread = ThreadPoolExecutor(1, "relay-edge")
        self._staged = [_Registered(engine) for _ in range(NUM_STAGED)]
        self._landing = _Registered(engine)
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for index in range(NUM_STAGED):
            self._free.put_nowait(index)
        self._lent: set[bytes] = set()
        """Staging buffers that the other end has not said it took, as it would say it."""
        self._frames: asyncio.Queue[bytes] = asyncio.Queue(_MAX_FRAMES)
        self._is_closed = False
        self.carrier = "Mooncake"
        self._lost = LinkLostError("the edge is closed")
        """Why nothing more comes, once `_listening` has ended."""
        self._listening = asyncio.ensure_future(self._listen())

    async def send(self, head: bytes, body: memoryview | None = None) -> None:
        """Hand over a message; waits while both staging buffers are still to be read."""
        if self._is_closed:
            raise LinkLostError("the edge is closed")
        if body is None or not len(body):
            await self._heads.send(_PLAIN + head)
            return
        index = await self._unless_lost(self._free.get)
        address = self._staged[index].fill(body)
        self._lent.add(bytes([index]))
        await self._heads.send(_WITH_BODY + msgspec.msgpack.encode(_Body(index, address, len(body), self._name, head)))

    async def receive(self, place: Place = nowhere) -> Received:
        """The next message. Cancelled in the middle of a body, it leaves an edge that can only be closed."""
        frame = await self._unless_lost(self._frames.get)
        if frame[:1] == _PLAIN:
            return Received(frame[1:], 0)
        body = unpack(frame[1:], _Body)
        if (target := place(body.head, body.num_bytes)) is not None:
            await self._read(body)
            target[:] = self._landing.view(body.num_bytes)
        await self._heads.send(_TAKEN + bytes([body.buffer]))
        return Received(body.head, body.num_bytes)

    async def close(self) -> None:
        """Let go of the edge and of its memory; harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._listening.cancel()
        for buffer in (*self._staged, self._landing):
            self._thread.submit(buffer.release)  # behind a read that still goes on
        self._thread.shutdown(wait=False)
        await self._heads.close()

    async def _listen(self) -> None:
        """Take in heads, so that a sender learns what was taken also while nobody receives."""
        while True:
            try:
                frame = (await self._heads.receive()).head
            except LinkLostError as error:
                self._lost = error
                return
            if frame[:1] == _TAKEN and frame[1:] in self._lent:
                self._lent.remove(frame[1:])
                self._free.put_nowait(frame[1])
            elif frame[:1] not in (_PLAIN, _WITH_BODY) or self._frames.full():
                self._lost = LinkLostError("the other end speaks another protocol")
                return
            else:
                self._frames.put_nowait(frame)

    async def _read(self, body: _Body) -> None:
        def read() -> int:
            target = self._landing.fit(body.num_bytes)
            return int(self._engine.transfer_sync_read(body.name, target, body.address, body.num_bytes))

        if status := await asyncio.get_running_loop().run_in_executor(self._thread, read):
            what = f"a body of {body.num_bytes} bytes"
            raise LinkLostError(f"{what} could not be read from {body.name} (Mooncake's status {status})")

    async def _unless_lost(self, take: Callable[[], Any]) -> Any:
        """What a queue has, or the news that the connection broke, once all that came before is taken."""
        if self._is_closed:
            raise LinkLostError("the edge is closed")
        taking = asyncio.ensure_future(take())
        try:
            await asyncio.wait((taking, self._listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not taking.done():
                taking.cancel()
        if taking.done() and not taking.cancelled():
            return taking.result()
        raise LinkLostError(str(self._lost)) from self._lost


class _Registered:
    """Memory that the engine may read and write; grows to the longest body."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._memory = np.empty(0, np.uint8)

    def fit(self, num_bytes: int) -> int:
        """Make room; returns the address."""
        if len(self._memory) < num_bytes:
            self.release()
            memory = np.zeros(num_bytes, np.uint8)
            if status := self._engine.register_memory(memory.ctypes.data, num_bytes):
                raise LinkLostError(f"Mooncake cannot register {num_bytes} bytes (status {status}): raise `ulimit -l`")
            self._memory = memory
        return int(self._memory.ctypes.data)

    def fill(self, body: memoryview) -> int:
        """Copy a body in; returns its address."""
        address = self.fit(len(body))
        self._memory[: len(body)] = np.frombuffer(body, np.uint8)
        return address

    def view(self, num_bytes: int) -> memoryview:
        """The first bytes."""
        return self._memory.data[:num_bytes]

    def release(self) -> None:
        """Give the memory back; harmless when repeated."""
        memory, self._memory = self._memory, np.empty(0, np.uint8)
        if len(memory):
            self._engine.unregister_memory(memory.ctypes.data)


def _open_engine(host: str) -> Any:
    """An engine that is reached by its own address, without a metadata server."""
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(STEP_SECONDS))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")  # errors only
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise EnvironmentSetupError(
            f"relay.transport = 'mooncake' needs Mooncake ({error}): `pip install laminar-rl[mooncake]`, and the system's "
            "libibverbs1, libnl-3-200 and libnl-route-3-200"
        ) from error
    engine = TransferEngine()
    devices = sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    kind = "rdma" if devices else "tcp"
    if engine.initialize(host, "P2PHANDSHAKE", kind, ",".join(devices)) != 0:
        raise EnvironmentSetupError(f"Mooncake cannot use {kind} at {host!r}; relay.transport = 'zmq' needs no such thing")
    return engine
