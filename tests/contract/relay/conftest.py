"""Chains of simulated machines in one process: real stores, real hop protocol, any transport, no Redis."""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from laminar.policies.chain import Hop
from laminar.types import WeightVersion
from relay.follower import Follower, Neighbour
from relay.link import Credentials, HopLimits
from relay.messages import Chunk, decode
from relay.publisher import Publisher
from relay.puller import read_manifest, verify_folder
from relay.receiver import HopReport, Receiver
from relay.sender import Sender
from relay.shelf import Shelf
from relay.store import WEIGHTS_NAME, VersionStore
from relay.transports.base import Transport
from relay.transports.collective import CollectiveTransport
from relay.transports.memory import MemoryNetwork
from relay.transports.mooncake import MooncakeTransport
from relay.transports.shaped import ShapedTransport
from relay.transports.shared import zmq_or_shared
from relay.transports.zmq_tcp import ZmqTransport

MOONCAKE = pytest.param("mooncake", marks=pytest.mark.slow)
TRANSPORT_KINDS = ("memory", "zmq", "auto", "collective", MOONCAKE)
"""Every transport that ships; a new one is added here, to `transport_maker` and to `chain`."""

CHUNK_BYTES = 4096
NUM_VALUES = 40_000
QUICK = HopLimits(silence_seconds=5.0, alive_seconds=0.02, stall_seconds=5.0, avoid_seconds=0.3, retry_seconds=0.02)


def check_whole(store: VersionStore, version: WeightVersion) -> None:
    """Every checksum holds, and every number of version n is n."""
    with store.lease(version) as folder:
        verify_folder(folder)
        manifest = read_manifest(folder)
        assert manifest.version == version
        data = (folder / WEIGHTS_NAME).read_bytes()
        for spec in manifest.tensors.values():
            assert (np.frombuffer(data, np.float32, spec.nbytes // 4, spec.offset) == version.number).all()
        assert (folder / "config.json").read_text() == '{"model_type": "llama"}'


class Machine:
    """One simulated machine and its relay."""

    def __init__(
        self,
        chain: "Chain",
        name: str,
        *,
        is_master: bool,
        token: str = "secret",
        run_id: str = "run",
        limits: HopLimits = QUICK,
        mapping_readers: int = 1,
    ) -> None:
        self.chain, self.name, self.is_master, self.limits = chain, name, is_master, limits
        self.store = VersionStore(chain.root / name, "run", name, mapping_readers=mapping_readers)
        self.store.root.mkdir(exist_ok=True)
        self.store.create()
        self.credentials = Credentials(run_id, name, token)
        self.joined = next(chain.places)
        self.reports: list[HopReport] = []
        self.sent: list[int] = []
        self.shape: Callable | None = None
        self.bytes_per_second: float | None = None
        self.receiver: Receiver | None = None
        self.publisher: Publisher | None = None
        self.failure: BaseException | None = None
        self.avoided: frozenset[str] = frozenset()

    async def start(self) -> "Machine":
        """Take part: serve, and follow the chain unless it is the master."""
        self.shelf = Shelf(self.store)
        self.transport: Transport = ShapedTransport(
            self.chain.make_transport(self.name), self._shape, bytes_per_second=self.bytes_per_second
        )
        self.address = await self.transport.start()
        sender = Sender(self.store, self.shelf, self.credentials, self.limits)
        self._tasks = [asyncio.create_task(self.transport.serve(sender.serve))]
        if not self.is_master:
            self.receiver = Receiver(self.store, self.shelf, self.limits, self.reports.append)
            self.follower = Follower(self.transport, self.receiver, self.credentials, self._neighbours, self.limits)
            self._tasks.append(asyncio.create_task(self.follower.run()))
        self.chain.living[self.name] = self
        return self

    async def die(self) -> None:
        """What others see of a kill: edges break; the store stays as it is, minus locks."""
        self.chain.living.pop(self.name, None)
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                self.failure = outcome
        await self.transport.close()
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def publish(self, number: int, lineage: int = 0) -> WeightVersion:
        """Make a version appear in this master's store."""
        if self.publisher is None:
            self.publisher = Publisher(self.store, self.chain.model_files, chunk_bytes=CHUNK_BYTES)
        version = WeightVersion(lineage, number)
        report = self.publisher.publish(
            version, [("a", torch.full((NUM_VALUES,), float(number))), ("b", torch.full((7,), float(number)))]
        )
        assert not report.skipped
        self.shelf.notify()
        return version

    @property
    def num_verified(self) -> int:
        """Pieces of the arriving version that are here."""
        incoming = self.shelf.incoming
        return 0 if incoming is None else len(incoming.manifest.checksums) - len(incoming.missing)

    async def reaches(self, version: WeightVersion) -> None:
        """Wait until this machine's newest version is this one, and whole."""
        await self.chain.until(lambda: self.store.newest() == version, f"{self.name} to hold {version}")
        check_whole(self.store, version)

    def _neighbours(self) -> tuple[float, list[Neighbour]]:
        others = [other for other in self.chain.living.values() if other is not self]
        return self.joined, [
            Neighbour(
                Hop(
                    other.name,
                    other.joined,
                    is_master=other.is_master,
                    is_blocked=other.receiver is not None and other.receiver.is_blocked,
                ),
                other.address,
                other.store.newest(),
            )
            for other in others
        ]

    async def _shape(self, message):
        spoken = decode(message[0])
        messages = [message]
        if isinstance(spoken, Chunk) and self.shape is not None:
            messages = await self.shape(spoken, message)
        self.sent += [decode(head).index for head, _ in messages if isinstance(decode(head), Chunk)]
        return messages


class Chain:
    """Machines that find each other by a list that is always right."""

    def __init__(self, root: Path, model_files: Path, make_transport: Callable[[str], Transport]) -> None:
        self.root, self.model_files, self.make_transport = root, model_files, make_transport
        self.places = itertools.count(1.0)
        self.living: dict[str, Machine] = {}
        self.all: list[Machine] = []

    async def add(self, name: str, *, is_master: bool = False, **settings) -> Machine:
        """A machine that takes part from now on."""
        machine = self.prepare(name, is_master=is_master, **settings)
        return await machine.start()

    def prepare(self, name: str, *, is_master: bool = False, **settings) -> Machine:
        """A machine that does not take part yet."""
        machine = Machine(self, name, is_master=is_master, **settings)
        self.all.append(machine)
        return machine

    async def until(self, condition: Callable[[], bool], name: str, seconds: float = 30.0) -> None:
        """Wait for a condition."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"waited {seconds} s for {name}") from None


@pytest.fixture(name="check_whole")
def check_whole_fixture() -> Callable[[VersionStore, WeightVersion], None]:
    """`check_whole`: every checksum of a version holds, and every number of version n is n."""
    return check_whole


def transport_maker(kind: str) -> Callable[[str], Transport]:
    """Makes transports of one kind, by the machine's name."""
    if kind == "memory":
        return MemoryNetwork().transport
    if kind == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs the extra `mooncake` and libibverbs1", exc_type=ImportError)
    transports: dict[str, Callable[[str], Transport]] = {
        "zmq": ZmqTransport,
        "auto": zmq_or_shared,
        "collective": CollectiveTransport,
        "mooncake": MooncakeTransport,
    }
    return lambda name: transports[kind]("127.0.0.1")


@pytest.fixture(params=TRANSPORT_KINDS)
def make_transport(request: pytest.FixtureRequest) -> Callable[[str], Transport]:
    """Transports of one kind."""
    return transport_maker(request.param)


@pytest.fixture(params=["memory", "zmq", "auto", pytest.param("collective", marks=pytest.mark.slow), MOONCAKE])
async def chain(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Chain]:
    """No machine yet."""
    make_transport = transport_maker(request.param)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        chain = Chain(Path(root), tmp_path, make_transport)
        yield chain
        for machine in list(chain.living.values()):
            await machine.die()
        for machine in chain.all:
            if machine.publisher is not None:
                machine.publisher.close()
