"""What every transport promises: whole messages, once and in order, or a lost link."""

import asyncio
import contextlib

import msgspec
import pytest
import torch

from relay.transports.base import LinkLostError
from relay.transports.collective import CollectiveConnection, CollectiveTransport
from relay.transports.zmq_tcp import ZmqTransport

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def serve(make_transport):
    """Start a transport that serves; returns its address and a transport to connect from."""
    tasks, transports = [], []

    async def start(handle):
        server, client = make_transport("server"), make_transport("client")
        transports.extend((server, client))
        address = await server.start()
        await client.start()
        tasks.append(asyncio.create_task(server.serve(handle)))
        return server, address, client

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for transport in transports:
        await transport.close()


async def echo(connection) -> None:
    """Send everything back, until the other end is lost."""
    body = bytearray(4 * 1024**2)

    def place(head, num_bytes):
        return memoryview(body)[:num_bytes]

    try:
        while True:
            received = await connection.receive(place)
            answer = memoryview(bytes(body[: received.num_bytes])) if received.num_bytes else None
            await connection.send(received.head, answer)
    except LinkLostError:
        return


async def test_messages_arrive_whole_and_in_order_with_their_bodies_where_they_shall_lie(serve):
    _, address, client = await serve(echo)
    connection = await client.connect(address)
    sizes = [0, 1, 70_000, 3 * 1024**2, 5]

    async def send_all() -> None:
        for index, size in enumerate(sizes):
            await connection.send(b"%d" % index, memoryview(bytes([index]) * size) if size else None)

    async with asyncio.TaskGroup() as group:
        group.create_task(send_all())  # a sender may have to wait until what it sent is taken
        for index, size in enumerate(sizes):
            target = bytearray(size)
            received = await connection.receive(lambda head, n, target=target: memoryview(target))
            assert (received.head, received.num_bytes) == (b"%d" % index, size)
            assert target == bytes([index]) * size
    await connection.close()


async def test_the_receiver_sees_the_head_and_the_length_before_it_says_where_the_body_lies(serve):
    _, address, client = await serve(echo)
    connection = await client.connect(address)
    await connection.send(b"head", memoryview(b"12345"))
    asked = []
    received = await connection.receive(lambda head, num_bytes: asked.append((head, num_bytes)))
    assert asked == [(b"head", 5)]
    assert received.num_bytes == 5


async def test_a_body_that_nobody_wants_does_not_disturb_the_next_message(serve):
    _, address, client = await serve(echo)
    connection = await client.connect(address)
    await connection.send(b"1", memoryview(bytes(100_000)))
    await connection.send(b"2")
    assert (await connection.receive()).head == b"1"
    assert (await connection.receive()).head == b"2"


async def test_edges_of_one_server_do_not_mix(serve):
    _, address, client = await serve(echo)
    connections = [await client.connect(address) for _ in range(5)]
    for turn in range(3):
        for number, connection in enumerate(connections):
            await connection.send(b"%d %d" % (number, turn))
    for number, connection in enumerate(connections):
        assert [(await connection.receive()).head for _ in range(3)] == [b"%d %d" % (number, turn) for turn in range(3)]


async def test_a_server_that_lets_go_of_an_edge_is_noticed_at_once(serve):
    async def leave(connection) -> None:
        await connection.receive()

    _, address, client = await serve(leave)
    connection = await client.connect(address)
    await connection.send(b"hello")
    with pytest.raises(LinkLostError):
        await connection.receive()


async def test_a_server_that_ends_is_noticed_by_those_who_wait_for_it(serve):
    served = asyncio.Event()

    async def stay(connection) -> None:
        await connection.receive()
        served.set()
        await asyncio.sleep(60)

    server, address, client = await serve(stay)
    connection = await client.connect(address)
    await connection.send(b"hello")
    await served.wait()
    await server.close()
    with pytest.raises(LinkLostError):
        await connection.receive()


async def test_an_address_where_nobody_is_any_more_is_a_lost_link(serve):
    server, address, client = await serve(echo)
    await server.close()

    async def ask() -> None:
        connection = await client.connect(address)
        await connection.send(b"hello")
        await connection.receive()

    with pytest.raises(LinkLostError):
        await ask()


async def test_nothing_is_asked_of_a_transport_that_is_closed(make_transport):
    """A closed ZeroMQ socket's memory may be another's by then, and that one's messages would be taken."""
    asked = []

    async def remember(connection) -> None:
        await connection.receive()
        asked.append(connection)
        await connection.receive()

    server, client = make_transport("server"), make_transport("client")
    address = await server.start()
    await client.start()
    serving = asyncio.create_task(server.serve(remember))
    connection = await client.connect(address)
    await connection.send(b"hello")
    async with asyncio.timeout(10):
        while not asked:
            await asyncio.sleep(0.01)
    await server.close()
    await client.close()
    for edge in (connection, asked[0]):
        with pytest.raises(LinkLostError, match=r"closed|left"):
            await edge.send(b"hello")
    await connection.close()
    await asyncio.gather(serving, return_exceptions=True)
    with contextlib.suppress(TimeoutError):  # it may wait for ever, but takes nothing
        await asyncio.wait_for(server.serve(remember), 0.2)


async def test_closing_twice_is_harmless_and_a_closed_edge_is_lost(serve):
    _, address, client = await serve(echo)
    connection = await client.connect(address)
    await connection.send(b"hello")
    await connection.receive()
    await connection.close()
    await connection.close()
    with pytest.raises(LinkLostError):
        await connection.send(b"hello")


async def test_one_edge_that_breaks_leaves_the_others(serve):
    _, address, client = await serve(echo)
    first, second = await client.connect(address), await client.connect(address)
    for connection in (first, second):
        await connection.send(b"hello")
        await connection.receive()
    await first.close()
    await second.send(b"still here")
    assert (await second.receive()).head == b"still here"


async def test_a_receive_that_is_cancelled_loses_nothing_that_came_before(serve):
    _, address, client = await serve(echo)
    connection = await client.connect(address)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await connection.receive()
    await connection.send(b"hello")
    assert (await connection.receive()).head == b"hello"


@pytest.mark.parametrize("place", [lambda head, num_bytes: None, lambda head, num_bytes: memoryview(bytearray(1))])
@pytest.mark.parametrize("num_bytes", [2**62, 2**63])
async def test_a_collective_body_that_is_said_to_be_too_long_for_any_memory_loses_its_edge_alone(place, num_bytes):
    lost = asyncio.Queue()

    async def take(connection) -> None:
        try:
            while True:
                await connection.receive(place)
        except LinkLostError as error:
            lost.put_nowait(str(error))

    server, client = CollectiveTransport("127.0.0.1"), ZmqTransport("127.0.0.1")
    heads = await client.connect(await server.start())
    serving = asyncio.create_task(server.serve(take))
    edge = CollectiveConnection(heads, "127.0.0.1", 1, torch.device("cpu"))
    await edge.send(b"hello", memoryview(b"1"))
    await heads.send(b"\1" + msgspec.msgpack.encode([num_bytes, b"head"]))
    assert await asyncio.wait_for(lost.get(), 10)
    assert not serving.done()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    for end in (edge, client, server):
        await end.close()
