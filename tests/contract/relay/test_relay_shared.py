"""Bodies by shared memory: who shares, what is read, and that everything else still arrives as bytes."""

import asyncio
import ctypes
import os
import threading
from pathlib import Path

import pytest

from laminar.types import WeightVersion
from relay.manifest import checksum
from relay.mapped import locate, map_file
from relay.transports.base import LinkLostError
from relay.transports.landing import BLOCK_BYTES, land
from relay.transports.memory import MemoryNetwork
from relay.transports.shaped import ShapedTransport
from relay.transports.shared import SharedTransport
from relay.transports.shared_folder import FilePart, FolderOffer, SharedFolder, this_machine

CLONE_NEWNET = 0x40000000
CONTENT = bytes(range(256)) * 64


@pytest.fixture
def slots(tmp_path):
    folder = tmp_path / "slots"
    folder.mkdir()
    return folder


@pytest.fixture
def slot(slots):
    """A mapped file."""
    return new_slot(slots / "0.safetensors", CONTENT)


def new_slot(path: Path, content: bytes):
    path.write_bytes(content)
    with path.open("rb") as file:
        return map_file(path, file.fileno())


def opened(folder: Path) -> SharedFolder:
    found = SharedFolder.open(FolderOffer.of("here", folder), "here")
    assert found is not None
    return found


def part_of(path: Path, offset: int = 0, num_bytes: int = 10) -> FilePart:
    return FilePart(path.name, path.stat().st_ino, offset, num_bytes)


def num_descriptors(folder: Path) -> int:
    """How many of this process's are of the folder or of what lies in it; earlier tests' are closed at any time."""
    paths = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(path == str(folder) or path.startswith(f"{folder}/") for path in paths)


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


class Edge:
    """Two ends, and the bodies that were sent as bytes between them."""

    def __init__(self, network, transports) -> None:
        self._transports, self.sent = transports, network

    async def open(self) -> "Edge":
        server, client = self._transports
        served = asyncio.Queue()

        async def keep(connection):
            await served.put(connection)
            await asyncio.Event().wait()

        address = await server.start()
        self._serving = asyncio.create_task(server.serve(keep))
        self.down = await client.connect(address)
        self.up = await served.get()
        return self

    async def pass_on(self, body, head: bytes = b"head") -> tuple[int, bytes]:
        """Send a body down and a word up; the length and the bytes that arrived."""
        target = bytearray(len(body))
        await self.up.send(head, body)
        received = await self.down.receive(lambda head, num_bytes: memoryview(target))
        assert received.head == head
        await self.down.send(b"thanks")
        assert (await self.up.receive()).head == b"thanks"
        return received.num_bytes, bytes(target)

    async def close(self) -> None:
        await self.down.close()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)


@pytest.fixture
async def connect():
    """Make an edge between two machines."""
    edges = []

    async def connect_two(up: str = "here", down: str = "here") -> Edge:
        network, sent = MemoryNetwork(), []

        async def record(message):
            if message[1] is not None:
                sent.append(len(message[1]))
            return [message]

        ends = [
            SharedTransport(ShapedTransport(network.transport(name), record), machine)
            for name, machine in (("up", up), ("down", down))
        ]
        edges.append(await Edge(sent, ends).open())
        return edges[-1]

    yield connect_two
    for edge in edges:
        await edge.close()


async def test_after_the_first_body_those_in_the_same_folder_are_read_where_they_lie(connect, slots, slot):
    edge = await connect()
    assert edge.down.carrier == "memory"
    assert await edge.pass_on(memoryview(slot)[:100]) == (100, CONTENT[:100])
    assert edge.down.carrier == "shared memory"
    other = new_slot(slots / "1.safetensors", CONTENT[::-1])
    assert await edge.pass_on(memoryview(slot)[77:300]) == (223, CONTENT[77:300])
    assert await edge.pass_on(memoryview(other)[5:300]) == (295, CONTENT[::-1][5:300])
    assert edge.sent == [100]


async def test_a_body_that_lies_in_no_file_or_in_another_folder_is_sent(connect, tmp_path, slot):
    edge = await connect()
    elsewhere = new_slot(tmp_path / "elsewhere", CONTENT)
    await edge.pass_on(memoryview(slot)[:100])
    assert await edge.pass_on(memoryview(b"12345")) == (5, b"12345")
    assert await edge.pass_on(memoryview(bytearray(b"123456"))) == (6, b"123456")
    assert await edge.pass_on(memoryview(elsewhere)[:50]) == (50, CONTENT[:50])
    assert edge.sent == [100, 5, 6, 50]


@pytest.mark.parametrize("machines", [("here", "there"), ("", ""), ("here", ""), ("", "here")])
async def test_other_machines_get_bytes(connect, slot, machines):
    edge = await connect(*machines)
    for _ in range(3):
        assert await edge.pass_on(memoryview(slot)[3:100]) == (97, CONTENT[3:100])
    assert edge.sent == [97, 97, 97]
    assert edge.down.carrier == "memory"


async def test_a_folder_that_the_other_end_cannot_find_is_not_shared(connect, slots, slot):
    slots.rename(slots.with_name("moved"))
    edge = await connect()
    for _ in range(2):
        assert await edge.pass_on(memoryview(slot)[3:100]) == (97, CONTENT[3:100])
    assert edge.sent == [97, 97]


async def test_a_body_that_nobody_wants_is_dropped_and_the_next_message_arrives(connect, slot):
    edge = await connect()
    await edge.pass_on(memoryview(slot)[:100])
    await edge.up.send(b"unwanted", memoryview(slot))
    received = await edge.down.receive()
    assert (received.head, received.num_bytes) == (b"unwanted", len(CONTENT))
    assert await edge.pass_on(memoryview(slot)[:9]) == (9, CONTENT[:9])


async def test_a_file_that_has_gone_before_it_is_read_gives_an_empty_body_and_bytes_from_then_on(connect, slots, slot):
    edge = await connect()
    for _ in range(2):
        await edge.pass_on(memoryview(slot)[:100])
    (slots / "0.safetensors").unlink()
    other = new_slot(slots / "0.safetensors", CONTENT)  # the same name: another file
    for _ in range(2):  # both were under way
        await edge.up.send(b"gone", memoryview(slot)[:30])
    for _ in range(2):
        assert (await edge.down.receive()).num_bytes == 30  # it had been mapped before
    (slots / "0.safetensors").unlink()
    for _ in range(2):
        await edge.up.send(b"gone", memoryview(other)[:40])
    for _ in range(2):
        received = await edge.down.receive()
        assert (received.head, received.num_bytes) == (b"gone", 0)
    await edge.down.send(b"again")
    await edge.up.receive()
    assert await edge.pass_on(memoryview(other)[:50]) == (50, CONTENT[:50])
    assert edge.sent == [100, 50]
    assert edge.down.carrier == "memory"


async def test_an_edge_that_is_closed_lets_go_of_folder_and_files(connect, slots):
    edge = await connect()
    slot = new_slot(slots / "0.safetensors", CONTENT)
    for _ in range(2):
        await edge.pass_on(memoryview(slot)[:100])
    del slot
    assert is_mapped(slots / "0.safetensors")
    assert num_descriptors(slots) > 0
    await edge.close()
    await edge.close()
    assert not is_mapped(slots / "0.safetensors")
    assert num_descriptors(slots) == 0


async def test_what_is_no_frame_loses_the_link(connect):
    for frame in (b"", b"\x09head", b"\x03nonsense", b"\x01nonsense"):
        edge = await connect()
        await edge.up._inner.send(frame)
        with pytest.raises(LinkLostError, match="another protocol"):
            await edge.down.receive()


def test_only_the_folder_that_is_meant_is_opened(tmp_path, slots):
    offer = FolderOffer.of("here", slots)
    link = tmp_path / "link"
    link.symlink_to(slots)
    assert SharedFolder.open(offer, "there") is None
    assert SharedFolder.open(offer, "") is None
    for wrong in (
        FolderOffer("here", str(tmp_path), offer.device, offer.inode),
        FolderOffer("here", str(slots), offer.device, offer.inode + 1),
        FolderOffer("here", str(slots), offer.device + 1, offer.inode),
        FolderOffer("here", str(link), offer.device, offer.inode),
        FolderOffer("here", str(slots / "none"), offer.device, offer.inode),
        FolderOffer("here", "a\0b", offer.device, offer.inode),
    ):
        assert SharedFolder.open(wrong, "here") is None
    opened(slots).close()


def test_only_plain_files_of_the_folder_are_read(tmp_path, slots):
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    (slots / "link").symlink_to(secret)
    os.mkfifo(slots / "pipe")
    (slots / "folder").mkdir()
    (slots / "empty").touch()
    (slots / ".hidden").write_bytes(CONTENT)
    folder = opened(slots)
    before, inode = num_descriptors(secret.parent), secret.stat().st_ino
    for name in ("../secret", str(secret), "link", "pipe", "folder", "empty", ".hidden", ".", "..", "", "none", "a\0b"):
        found = slots / name if name in ("pipe", "empty", ".hidden") else secret
        assert folder.read(FilePart(name, found.stat().st_ino, 0, 10)) is None
        assert folder.read(FilePart(name, inode, 0, 10)) is None
    assert num_descriptors(secret.parent) == before
    folder.close()


def test_parts_that_the_file_does_not_have_are_not_read(slots, slot):
    folder = opened(slots)
    whole = part_of(slots / "0.safetensors", 0, len(CONTENT))
    assert bytes(folder.read(whole)) == CONTENT
    for offset, num_bytes in ((1, len(CONTENT)), (len(CONTENT), 1), (-1, 5), (3, 0), (3, -1), (2**63, 2**63)):
        assert folder.read(FilePart(whole.name, whole.inode, offset, num_bytes)) is None
    assert folder.read(FilePart(whole.name, whole.inode + 1, 0, 10)) is None
    folder.close()


def test_a_file_that_was_replaced_is_mapped_anew_and_the_old_one_goes(slots):
    path = slots / "0.safetensors"
    path.write_bytes(b"a" * 100)
    folder = opened(slots)
    assert bytes(folder.read(part_of(path))) == b"a" * 10
    path.rename(slots / "old")
    path.write_bytes(b"b" * 100)
    assert bytes(folder.read(part_of(path))) == b"b" * 10
    assert not is_mapped(slots / "old")
    folder.close()


def test_a_piece_knows_its_file_and_place(slot):
    piece = memoryview(slot)[100:200][10:]
    file, offset = locate(piece)
    assert (file.path, offset) == (slot.path, 110)
    assert locate(memoryview(b"in no file")) is None
    assert locate(memoryview(slot)[5:5]) is None


def test_another_network_namespace_is_another_machine():
    found = [this_machine()]

    def look() -> None:
        if ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0:
            found.append(this_machine())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if len(found) == 1:
        pytest.skip("needs the right to make a network namespace")
    here, there = found
    assert here != there
    assert here.split()[0] == there.split()[0]


async def test_relays_of_one_host_share_where_the_transport_does(chain, request):
    master = await chain.add("master", is_master=True)
    a = await chain.add("a")
    b = await chain.add("b")
    version = master.publish(1)
    for hop in (a, b):
        await hop.reaches(version)
    expected = {"memory": "memory", "zmq": "TCP", "auto": "shared memory", "collective": "gloo", "mooncake": "Mooncake"}
    kind = request.node.callspec.params["chain"]
    assert [hop.follower.carrier for hop in (a, b)] == [expected[kind]] * 2


async def test_a_version_that_lost_its_slot_is_still_passed_on(chain):
    master = await chain.add("master", is_master=True)
    version = master.publish(1)
    master.store.slot_path(version).unlink()  # as when the layout changes under a version that is still read
    assert master.store.slot_path(version).name == "model.safetensors"
    a = await chain.add("a")
    await a.reaches(version)
    assert version == WeightVersion(0, 1)


@pytest.mark.parametrize("num_bytes", [1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 77])
def test_a_body_that_is_landed_has_the_checksum_of_its_copy(num_bytes):
    body, place = os.urandom(num_bytes), bytearray(num_bytes)
    assert land(memoryview(body), memoryview(place)) == checksum(body)
    assert place == body
