"""What a hop does about an upstream that lies, keeps silent, or offers what does not fit. Over the in-memory transport."""

import asyncio

import pytest

from laminar.errors import DeadlineError, EnvironmentSetupError, RelayError
from laminar.types import WeightVersion
from relay.link import Credentials, HopLimits, Link, admit, greet
from relay.manifest import Manifest, TensorSpec, checksum
from relay.messages import Alive, Chunk, FetchFiles, Files, Offer, Pull, Want, decode, encode, to_ranges
from relay.receiver import Receiver
from relay.shelf import Shelf
from relay.store import VersionStore
from relay.transports.memory import MemoryNetwork
from relay.transports.shaped import ShapedTransport

LIMITS = HopLimits(silence_seconds=0.2, alive_seconds=0.01, stall_seconds=0.1)
UPSTREAM = Credentials("run", "up", "secret")


@pytest.fixture
def heads():
    """The head of every message that travelled the edge."""
    return []


@pytest.fixture
async def ends(heads):
    """Both ends of an edge: the upstream's, and the downstream's."""

    async def record(message):
        heads.append(message[0])
        return [message]

    network = MemoryNetwork()
    server = ShapedTransport(network.transport("up"), record)
    served = asyncio.Queue()

    async def keep(connection):
        await served.put(connection)
        await asyncio.sleep(60)

    serving = asyncio.create_task(server.serve(keep))
    client = await ShapedTransport(network.transport("down"), record).connect("up")
    yield await served.get(), client
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


@pytest.fixture
def edge(ends):
    """`ends` as links: the upstream's, and the downstream's whose other end is called relay up."""
    return Link(ends[0], "down", LIMITS), Link(ends[1], "relay up", LIMITS)


@pytest.fixture
def store(tmp_path):
    store = VersionStore(tmp_path, "run", "down")
    store.create()
    return store


def manifest(*, file_bytes: int = 100, number: int = 1, run_id: str = "run") -> str:
    tensors = {"a": TensorSpec("F32", (1,), 0, 4)}
    return Manifest(WeightVersion(0, number), run_id, tensors, {}, file_bytes, 1 << 60, ("0" * 16,)).to_json()


async def pull(link, store, *, newest=None):
    receiver = Receiver(store, Shelf(store), LIMITS)
    try:
        await receiver.pull(link, lambda: False, lambda: newest)
    finally:
        receiver.close()


async def test_a_silent_upstream_is_named_with_the_step_that_waited(edge, store):
    _, down = edge
    with pytest.raises(DeadlineError, match=r"waited 0.2 s for an offer from relay up"):
        await pull(down, store)


async def test_an_upstream_that_lives_but_does_not_offer_what_is_announced_is_left(edge, store):
    up, down = edge

    async def say_alive():
        while True:
            await up.send(Alive())
            await asyncio.sleep(0.01)

    talking = asyncio.create_task(say_alive())
    with pytest.raises(DeadlineError, match=r"relay up to offer 0\.7"):
        await pull(down, store, newest=WeightVersion(0, 7))
    talking.cancel()


async def test_a_version_too_large_for_shared_memory_ends_the_relay_with_the_bytes_and_the_remedy(edge, store):
    up, down = edge
    pulling = asyncio.create_task(pull(down, store))
    assert isinstance((await up.receive("a wish"))[0], Want)
    await up.send(Offer("0.1", manifest(file_bytes=10**15), {}))
    with pytest.raises(EnvironmentSetupError, match=r"need 2,000,000,008,388,608 bytes in .*--shm-size"):
        await pulling
    assert store.slot_lengths() == []


async def test_model_files_come_before_the_slots_are_made_so_that_both_must_fit(edge, store):
    up, down = edge
    pulling = asyncio.create_task(pull(down, store))
    await up.receive("a wish")
    await up.send(Offer("0.1", manifest(file_bytes=10**15), {"config.json": checksum(b"{}")}))
    assert isinstance((await up.receive("a wish for files"))[0], FetchFiles)
    await up.send(Files([("config.json", 2)]), memoryview(b"{}"))
    with pytest.raises(EnvironmentSetupError, match="the weight slots need"):
        await pulling
    assert (store.model_files / "config.json").read_text() == "{}"


async def test_weights_of_another_run_are_refused(edge, store):
    up, down = edge
    await up.send(Offer("0.1", manifest(run_id="other"), {}))
    with pytest.raises(RelayError, match=r"relay up offered 0\.1 of run other"):
        await pull(down, store)


async def test_a_manifest_of_another_release_is_refused(edge, store):
    up, down = edge
    await up.send(Offer("0.1", manifest().replace('"format": 1', '"format": 99'), {}))
    with pytest.raises(RelayError, match="manifest format 99"):
        await pull(down, store)


async def test_an_upstream_that_speaks_out_of_turn_is_left(edge, store):
    up, down = edge
    await up.send(Want("", ""))
    with pytest.raises(RelayError, match="relay up said Want instead of an offer"):
        await pull(down, store)


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 4])
@pytest.mark.parametrize("last_words", [[], [Alive()]])
async def test_a_version_whose_every_piece_came_is_shown_though_its_upstream_is_dead_by_then(
    ends, edge, store, num_pieces, last_words
):
    up, down = edge
    pieces = [bytes([index]) * 100 for index in range(num_pieces)]
    tensors = {"a": TensorSpec("U8", (100 * num_pieces,), 0, 100 * num_pieces)}
    checksums = tuple(checksum(piece) for piece in pieces)
    offered = Manifest(WeightVersion(0, 1), "run", tensors, {}, 100 * num_pieces, 100, checksums)
    receiver = Receiver(store, Shelf(store), LIMITS)
    offer = Offer("0.1", offered.to_json(), {})
    await up.send(offer)
    await receiver.pull(down, lambda: False, lambda: None)  # the slots are made, then it asks anew
    await up.send(offer)
    pulling = asyncio.create_task(receiver.pull(down, lambda: False, lambda: None))
    while not isinstance((await up.receive("what is missing"))[0], Pull):
        pass
    for message in last_words:
        await up.send(message)
    for index, piece in enumerate(pieces):
        await up.send(Chunk("0.1", index), memoryview(piece))
    await ends[0].close()
    with pytest.raises(RelayError, match="closed"):
        await pulling
    assert store.versions() == [WeightVersion(0, 1)]
    receiver.close()


async def test_an_upstream_that_cannot_prove_the_token_is_not_believed(edge):
    up, down = edge

    async def answer():
        with pytest.raises((RelayError, DeadlineError)):
            await admit(up, Credentials("run", "up", "guessed"))

    answering = asyncio.create_task(answer())
    with pytest.raises(RelayError, match="relay up does not know this run's token"):
        await greet(down, Credentials("run", "down", "secret"))
    await answering


async def test_the_token_never_travels(edge, heads):
    up, down = edge
    async with asyncio.TaskGroup() as group:
        group.create_task(admit(up, UPSTREAM))
        group.create_task(greet(down, Credentials("run", "down", "secret")))
    assert len(heads) == 4
    assert not any(b"secret" in head for head in heads)


def test_what_is_no_message_is_an_error_of_the_peer():
    with pytest.raises(RelayError, match="what is no message"):
        decode(b"\x81\xa4type\xa4nope")


def test_messages_survive_the_wire():
    for message in (Want("0.1", ""), Chunk("0.1", 7), Offer("0.1", "{}", {"config.json": "00"}), Alive()):
        assert decode(encode(message)) == message


def test_missing_pieces_as_ranges():
    assert to_ranges([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
    assert to_ranges([]) == []
