"""Edges by torch.distributed: heads over ZeroMQ, bodies over a two-rank process group for each direction of each edge.

The groups are made for the edge alone, outside torch's list of groups: the trainer's and the engines' are never touched, and
a failure aborts one edge. An edge that is made anew meets under a new epoch, so nothing of the old one can reach it.

Invariants: a body is sent only after its head said how long it is; it is received into memory of the edge and then copied
to its place, for a step that was given up may go on in its thread until its deadline; a group is made when the first body of
its direction is sent; a long body is received only if somebody wants it, so not from a peer that was not admitted.
Does not know what messages mean. Backend: gloo, or NCCL where both relays own a GPU; NCCL has not run yet.
"""

import asyncio
import itertools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from laminar.errors import EnvironmentSetupError, first_line
from relay.transports.base import Connection, Handler, LinkLostError, Place, Received, nowhere, unpack
from relay.transports.zmq_tcp import ZmqTransport

STEP_SECONDS = 6.0
"""Deadline for a group to be made, and for one body to pass."""

MAX_UNWANTED_BYTES = 64 * 1024**2
"""A body that nobody wants is received, to be dropped, only up to this: four of the longest pieces."""

_PLAIN, _WITH_BODY, _GROUP = b"\0", b"\1", b"\2"
_SENDER, _RECEIVER = 0, 1
_TAG = 0


class _Invitation(msgspec.Struct, frozen=True, array_like=True):
    """Where two ends meet to make a group."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    epoch: int


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """A message whose body follows through the group."""

    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    head: bytes


class CollectiveTransport:
    """Edges of one process, by gloo or NCCL.

    Args:
        host: address of the network card that others reach this machine by.
        device: the GPU that bodies go through, by NCCL, such as `cuda:0`; empty: by gloo. The same on all machines.

    Raises:
        EnvironmentSetupError: a device is named, but this torch has no NCCL or sees no GPU.
    """

    def __init__(self, host: str, device: str = "") -> None:
        if device and not (torch.distributed.is_nccl_available() and torch.cuda.is_available()):
            raise EnvironmentSetupError(
                "relay.num_gpus is above 0, but this torch has no NCCL or sees no GPU: set it to 0 for gloo, or install a "
                "CUDA build of torch (one for CUDA 12 needs `pip install laminar-rl[nccl]`)"
            )
        self._host, self._device = host, torch.device(device or "cpu")
        self._heads = ZmqTransport(host)
        self._epochs = itertools.count(1)

    async def start(self) -> str:
        """As ZeroMQ's."""
        return await self._heads.start()

    async def serve(self, handle: Handler) -> None:
        """Run `handle` for everybody who connects, until cancelled."""

        async def handle_edge(heads: Connection) -> None:
            edge = self._edge(heads)
            try:
                await handle(edge)
            finally:
                await edge.close()

        await self._heads.serve(handle_edge)

    async def connect(self, address: str) -> "CollectiveConnection":
        """An edge to `address`, as ZeroMQ's."""
        return self._edge(await self._heads.connect(address))

    async def close(self) -> None:
        """End all edges."""
        await self._heads.close()

    def _edge(self, heads: Connection) -> "CollectiveConnection":
        return CollectiveConnection(heads, self._host, next(self._epochs), self._device)


class CollectiveConnection:
    """One end of an edge.

    Args:
        heads: carries the heads.
        host: of this machine, where its sending group meets.
        epoch: new for every edge of the process.
        device: where bodies go through.
    """

    def __init__(self, heads: Connection, host: str, epoch: int, device: torch.device) -> None:
        self._heads, self._host, self._epoch, self._device = heads, host, epoch, device
        self._threads = ThreadPoolExecutor(2, "relay-edge")  # one sends, one receives
        self._landing = torch.empty(0, dtype=torch.uint8, device=device)
        self._sending: _Group | None = None
        self._receiving: _Group | None = None
        self.carrier = "NCCL" if device.type == "cuda" else "gloo"

    async def send(self, head: bytes, body: memoryview | None = None) -> None:
        """Hand over a message; returns when the other end has taken its body."""
        if body is None or not len(body):
            await self._heads.send(_PLAIN + head)
            return
        if self._sending is None:
            self._sending = await self._invite()
        await self._heads.send(_WITH_BODY + msgspec.msgpack.encode(_Body(len(body), head)))
        await self._in_thread(self._sending.send, _as_tensor(body))

    async def receive(self, place: Place = nowhere) -> Received:
        """The next message. Cancelled in the middle of a body, it leaves an edge that can only be closed."""
        while True:
            frame = (await self._heads.receive()).head
            kind, rest = frame[:1], frame[1:]
            if kind == _PLAIN:
                return Received(rest, 0)
            if kind == _GROUP and self._receiving is None:
                self._receiving = await self._in_thread(_join, unpack(rest, _Invitation), self._device)
                continue
            if kind != _WITH_BODY or self._receiving is None:
                raise LinkLostError("the other end speaks another protocol")
            body = unpack(rest, _Body)
            target = place(body.head, body.num_bytes)
            if target is None and body.num_bytes > MAX_UNWANTED_BYTES:
                raise LinkLostError(f"the other end sends {body.num_bytes:,} bytes that nobody wants")
            landed = await self._in_thread(self._land, self._receiving, body.num_bytes)
            if target is not None:
                _as_tensor(target).copy_(landed)
            return Received(body.head, body.num_bytes)

    async def close(self) -> None:
        """Abort both groups and let go of the edge; harmless when repeated."""
        for group in (self._sending, self._receiving):
            if group is not None:
                group.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._heads.close()

    async def _invite(self) -> "_Group":
        """Make the sending group together with the other end."""
        timeout = timedelta(seconds=STEP_SECONDS)
        store = TCPStore(self._host, 0, 2, is_master=True, timeout=timeout, wait_for_workers=False)
        invitation = _Invitation(self._host, store.port, self._epoch)
        await self._heads.send(_GROUP + msgspec.msgpack.encode(invitation))
        return await self._in_thread(_Group, store, self._host, self._epoch, _SENDER, self._device)

    def _land(self, group: "_Group", num_bytes: int) -> torch.Tensor:
        if len(self._landing) < num_bytes:
            self._landing = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        landed = self._landing[:num_bytes]
        group.receive(landed)
        return landed

    async def _in_thread(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run a blocking step of torch's, which ends by its own deadline."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, step, *arguments)
        except RuntimeError as error:
            raise LinkLostError(f"the edge's group broke ({first_line(error)})") from error


class _Group:
    """A two-rank group for one direction of one edge."""

    def __init__(self, store: TCPStore, host: str, epoch: int, rank: int, device: torch.device) -> None:
        self._store, self._device = store, device  # the meeting place lives as long as the group
        place = PrefixStore(f"epoch-{epoch}", store)
        self._group: Any = _nccl_group(place, rank) if device.type == "cuda" else _gloo_group(place, rank, host)

    def send(self, tensor: torch.Tensor) -> None:
        self._group.send([tensor.to(self._device)], _RECEIVER, _TAG).wait()
        self._settle()

    def receive(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], _SENDER, _TAG).wait()
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":  # NCCL's `wait` holds back the stream, not this thread
            torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        self._group.abort()


def _gloo_group(place: PrefixStore, rank: int, host: str) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=STEP_SECONDS)
    options._threads = 1
    return ProcessGroupGloo(place, rank, 2, options)


def _nccl_group(place: PrefixStore, rank: int) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=STEP_SECONDS)
    return ProcessGroupNCCL(place, rank, 2, options)


def _join(invitation: _Invitation, device: torch.device) -> _Group:
    host, timeout = invitation.host, timedelta(seconds=STEP_SECONDS)
    store = TCPStore(host, invitation.port, 2, is_master=False, timeout=timeout, wait_for_workers=False)
    return _Group(store, host, invitation.epoch, _RECEIVER, device)


def _as_tensor(data: memoryview) -> torch.Tensor:
    """The bytes themselves as a tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # what is sent is only read
        return torch.frombuffer(data, dtype=torch.uint8)
