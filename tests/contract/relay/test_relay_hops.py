"""The hop protocol, over every transport: versions arrive whole, whatever the network and the other hops do."""

import asyncio
import os
import struct
from contextlib import ExitStack

import msgspec
import pytest
import zmq
import zmq.asyncio

from laminar.types import WeightVersion
from relay.link import HopLimits, Link, greet
from relay.messages import Alive, FetchFiles, Files, Offer, Want
from relay.puller import read_manifest
from relay.store import WEIGHTS_NAME
from relay.transports.base import LinkLostError

CHUNK_BYTES = 4096
"""As the chain of the fixture publishes."""


class Gate:
    """Lets so many pieces of a machine's sending through, and holds the next until `open`."""

    def __init__(self, machine, num_pieces: int) -> None:
        self._left, self._opened = num_pieces, asyncio.Event()
        machine.shape = self._shape

    def open(self) -> None:
        self._opened.set()

    async def _shape(self, spoken, message):
        if self._left == 0:
            await self._opened.wait()
        else:
            self._left -= 1
        return [message]


async def line(chain, *names, **settings):
    """A master and hops behind it."""
    master = await chain.add("master", is_master=True)
    return master, *[await chain.add(name, **settings) for name in names]


def file_bytes(machine, version) -> int:
    with machine.store.lease(version) as folder:
        return (folder / WEIGHTS_NAME).stat().st_size


async def test_every_hop_of_a_chain_ends_with_the_version_and_each_piece_travels_each_edge_once(chain):
    master, *hops = await line(chain, "a", "b", "c")
    version = master.publish(1)
    for hop in hops:
        await hop.reaches(version)
    with master.store.lease(version) as folder:
        pieces = list(range(len(read_manifest(folder).checksums)))
    assert [machine.sent for machine in (master, *hops)] == [pieces, pieces, pieces, []]


async def test_versions_follow_one_another_and_only_the_kept_ones_stay(chain):
    master, a, b = await line(chain, "a", "b")
    for number in (1, 2, 3):
        version = master.publish(number)
        for hop in (a, b):
            await hop.reaches(version)

    def is_pruned() -> bool:  # a version that was being passed on can go once that has ended
        return all(hop.store.prune() is not None and hop.store.versions() == [version] for hop in (a, b))

    await chain.until(is_pruned, "one version to be left")
    assert [report.version for report in b.reports] == ["0.1", "0.2", "0.3"]


async def test_a_piece_is_passed_on_before_the_version_is_whole(chain):
    master, a, b = await line(chain, "a", "b")
    gate = Gate(master, 5)
    version = master.publish(1)
    await chain.until(lambda: b.num_verified == 5, "five pieces on the second hop")
    assert a.store.newest() is None
    gate.open()
    await b.reaches(version)


async def test_a_broken_piece_is_asked_for_again_and_never_passed_on(chain):
    master, a, b = await line(chain, "a", "b")

    async def flip_once(spoken, message, seen=[]):  # noqa: B006
        if spoken.index == 3 and not seen:
            seen.append(1)
            body = bytearray(message[1])
            body[17] ^= 1
            return [(message[0], body)]
        return [message]

    master.shape = flip_once
    version = master.publish(1)
    await b.reaches(version)
    assert [report.broken for report in a.reports + b.reports] == [1, 0]
    assert master.sent.count(3) == 2


@pytest.mark.parametrize("length", [0, 1, 4095])
async def test_a_truncated_piece_counts_as_broken(chain, length):
    master, a = await line(chain, "a")

    async def cut_once(spoken, message, seen=[]):  # noqa: B006
        if spoken.index == 3 and not seen:
            seen.append(1)
            return [(message[0], bytes(message[1][:length]))]
        return [message]

    master.shape = cut_once
    await a.reaches(master.publish(1))
    assert a.reports[0].broken == 1


async def test_a_slot_that_is_rewritten_under_a_reader_makes_a_broken_piece_and_no_torn_version(chain):
    master, a, b = await line(chain, "a", "b")
    version = master.publish(1)
    correct = []

    async def rewrite_once(spoken, message):
        if spoken.index == 3:
            with master.store.slot_path(version).open("r+b") as slot:
                slot.seek(3 * CHUNK_BYTES + 17)
                correct.append(slot.read(1))
                slot.seek(-1, os.SEEK_CUR)
                slot.write(b"!" if len(correct) == 1 else correct[0])
        return [message]

    master.shape = rewrite_once
    await b.reaches(version)
    assert [report.broken for report in a.reports + b.reports] == [1, 0]
    assert correct == [correct[0], b"!"]
    assert correct[0] != b"!"


async def test_reordered_pieces_are_taken_as_they_come(chain):
    master, a, b = await line(chain, "a", "b")

    async def swap_pairs(spoken, message, held=[]):  # noqa: B006
        if spoken.index % 2 == 0 and not held and spoken.index < 30:
            held.append((message[0], bytes(message[1])))
            return []
        return [message, *[held.pop() for _ in held[:1]]]

    master.shape = swap_pairs
    await b.reaches(master.publish(1))
    assert a.reports[0].broken == 0
    assert master.sent[:4] == [1, 0, 3, 2]


async def test_a_repeated_piece_is_passed_over_even_if_the_copy_is_broken(chain):
    master, a = await line(chain, "a")

    async def repeat(spoken, message):
        return [message, message, (message[0], bytes(len(message[1])))]

    master.shape = repeat
    version = master.publish(1)
    await a.reaches(version)
    assert (a.reports[0].bytes, a.reports[0].broken) == (file_bytes(master, version), 0)


async def test_a_hop_that_always_sends_a_piece_broken_is_left_for_the_one_before_it(chain):
    master, a, b = await line(chain, "a", "b")

    async def flip(spoken, message):
        return [(message[0], bytes(len(message[1])))] if spoken.index == 20 else [message]

    a.shape = flip
    version = master.publish(1)
    await b.reaches(version)
    assert b.reports[0].broken == 3
    assert master.sent.count(20) == 2


async def test_when_a_hop_dies_its_successor_resumes_at_exactly_the_missing_pieces(chain):
    master, a, b, c = await line(chain, "a", "b", "c")
    gate = Gate(a, 11)
    version = master.publish(1)
    await a.reaches(version)
    pieces = len(master.sent)
    await chain.until(lambda: b.num_verified == 11 and c.num_verified == 11, "eleven pieces on both")
    await a.die()
    gate.open()
    for hop in (b, c):
        await hop.reaches(version)
        assert hop.reports[0].bytes == file_bytes(master, version)
    assert master.sent[pieces:] == list(range(11, pieces))


async def test_a_master_that_is_restarted_on_its_slots_finishes_what_it_had_begun(chain):
    master, a, b = await line(chain, "a", "b")
    gate = Gate(master, 9)
    version = master.publish(1)
    await chain.until(lambda: b.num_verified == 9, "nine pieces on the last hop")
    await master.die()
    gate.open()
    await master.start()
    for hop in (a, b):
        await hop.reaches(version)
        assert hop.reports[0].bytes == file_bytes(master, version)


async def test_when_the_master_is_lost_for_good_the_next_one_supersedes_what_was_unfinished(chain):
    master, a, b = await line(chain, "a", "b")
    old = master.publish(1)
    await b.reaches(old)
    Gate(master, 9)
    master.publish(2)
    await chain.until(lambda: b.num_verified == 9, "nine pieces on the last hop")
    await master.die()
    assert a.store.newest() == b.store.newest() == old
    successor = await chain.add("successor", is_master=True)
    version = successor.publish(1, lineage=1)
    for hop in (a, b):
        await hop.reaches(version)
    assert [report.version for report in b.reports] == ["0.1", "1.1"]


async def test_a_late_joiner_takes_the_newest_version_from_its_neighbour(chain):
    master, a = await line(chain, "a")
    master.publish(1)
    version = master.publish(2)
    await a.reaches(version)
    before = list(master.sent)
    late = await chain.add("late")
    await late.reaches(version)
    assert master.sent == before
    assert a.sent == sorted(set(before))
    assert [report.version for report in late.reports] == ["0.2"]


async def test_a_hop_that_comes_back_takes_its_old_place_again(chain):
    master, a, b = await line(chain, "a", "b")
    await b.reaches(master.publish(1))
    await a.die()
    await b.reaches(master.publish(2))
    await a.start()
    await a.reaches(WeightVersion(0, 2))
    await chain.until(lambda: b.follower.upstream == "a", "the last hop to follow it again")
    master.sent.clear()
    await b.reaches(master.publish(3))
    assert len(master.sent) == len(set(master.sent))


async def test_a_version_under_way_is_finished_then_the_newest_goes_next(chain):
    master, a = await line(chain, "a")
    gate = Gate(master, 5)
    master.publish(1)
    await chain.until(lambda: a.num_verified == 5, "five pieces")
    master.publish(2)
    newest = master.publish(3)
    gate.open()
    await a.reaches(newest)
    assert [report.version for report in a.reports] == ["0.1", "0.3"]


async def test_a_slow_hop_holds_up_neither_the_trainer_nor_the_hops_before_it(chain):
    master, a = await line(chain, "a")
    slow = chain.prepare("slow")
    slow.bytes_per_second = 4e6
    await slow.start()
    last = await chain.add("last")
    gate = Gate(a, 3)  # the edge to the slow hop stands still meanwhile
    for number in range(1, 6):
        version = master.publish(number)
        await a.reaches(version)
    assert slow.store.newest() is None
    gate.open()
    await last.reaches(version)


@pytest.mark.parametrize("credits", [1, 2, 3, 4])
async def test_no_more_pieces_are_under_way_than_were_granted(chain, credits):
    master, a = await line(chain, "a", limits=HopLimits(silence_seconds=5.0, alive_seconds=0.02, credits=credits))
    most = 0

    async def watch(spoken, message):
        nonlocal most
        most = max(most, len(master.sent) + 1 - a.num_verified)
        return [message]

    master.shape = watch
    await a.reaches(master.publish(1))
    assert 1 <= most <= credits


async def test_a_relay_with_a_wrong_run_token_gets_nothing_and_disturbs_nobody(chain, caplog):
    caplog.set_level("INFO", "laminar.relay")
    master = await chain.add("master", is_master=True)
    stranger = await chain.add("stranger", token="wrong")
    a = await chain.add("a")
    version = master.publish(1)
    await a.reaches(version)
    await chain.until(lambda: "master does not know this run's token" in caplog.text, "the refusal")
    assert stranger.store.versions() == []
    assert stranger.num_verified == 0


DEEP = b"\x81\xa3foo" + b"\x91" * 100_000
"""MessagePack, nested deeper than anybody follows."""

ODD_MESSAGES = [
    [b""],
    *([kind] for kind in (b"\0", b"\1", b"\2", b"\3", b"\xff")),
    *([kind + rest] for kind in (b"\1", b"\2") for rest in (b"\xff\xff", b"garbage", b"\xff" * 40, bytes(40), DEEP)),
    [b"\2" + b"127.0.0.1 99999999 1"],
    *([b"\2" + msgspec.msgpack.encode(["127.0.0.1", port, 1])] for port in (-1, 0, 99_999_999)),
    [b"\1" + struct.pack("<BQQB", 0, 1, 10, 5) + b"\xff" * 5],
    *([b"\1" + msgspec.msgpack.encode([num_bytes, b""])] for num_bytes in (0, 1, 2**63)),
    *([b"\1" + msgspec.msgpack.encode([buffer, 1, 10, "\x00", b""])] for buffer in (-1, 1, 2)),
    [DEEP],
    [b"\0" + DEEP],
    [b"\0", b"a body"],
    [b"head", b"a body", b"more"],
]


async def say_oddly(chain, address: str, frames: list[bytes]) -> None:
    """Say something to a relay, without its token, and wait until it serves that edge no more."""
    if ":" not in address:
        connection = await chain.make_transport("stranger").connect(address)
        await connection.send(frames[0], memoryview(b"".join(frames[1:])))
        with pytest.raises(LinkLostError):
            await asyncio.wait_for(connection.receive(), 10)
        return
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://{address}")
        await socket.send_multipart(frames)
        assert await asyncio.wait_for(socket.recv_multipart(), 10) == [b""]


async def test_whatever_strangers_say_the_others_are_served(chain):
    master = await chain.add("master", is_master=True, limits=HopLimits(silence_seconds=0.5, alive_seconds=0.02))
    version = master.publish(1)
    for frames in ODD_MESSAGES:
        await say_oddly(chain, master.address, frames)
    a = await chain.add("a")
    await a.reaches(version)


async def test_a_relay_of_another_run_with_the_same_token_is_refused(chain, caplog):
    caplog.set_level("INFO", "laminar.relay")
    master = await chain.add("master", is_master=True)
    stranger = await chain.add("stranger", run_id="other")
    master.publish(1)
    await chain.until(lambda: "token" in caplog.text, "the refusal")
    assert stranger.store.versions() == []


async def test_model_files_that_are_being_replaced_hold_an_offer_up_and_end_nothing(chain):
    master = await chain.add("master", is_master=True)
    version = master.publish(1)
    going = master.store.model_files / "vocab.json"  # listed, and gone when it is read
    downstream = chain.make_transport("downstream")
    await downstream.start()
    connection = await downstream.connect(master.address)
    link = Link(connection, "master", master.limits)
    await greet(link, master.credentials)
    for wish, answer in ((Want("", ""), Offer), (FetchFiles(), Files)):
        going.symlink_to("nowhere")
        await link.send(wish)
        for _ in range(5):
            await link.expect(Alive, "a word")
        going.unlink()
        while not isinstance(message := (await link.receive("an answer"))[0], answer):
            assert isinstance(message, Alive)
    await connection.close()
    await downstream.close()
    a = await chain.add("a")
    await a.reaches(version)


async def test_with_every_slot_leased_a_hop_waits_and_its_successor_takes_from_the_one_before_it(chain):
    master, a, b = await line(chain, "a", "b")
    with ExitStack() as leases:
        for number in (1, 2, 3):
            version = master.publish(number)
            await a.reaches(version)
            await b.reaches(version)
            leases.enter_context(a.store.lease(version))
        version = master.publish(4)
        await b.reaches(version)
        assert a.receiver.is_blocked
        assert [held.number for held in a.store.versions()] == [1, 2, 3]
    await a.reaches(version)
    await chain.until(lambda: not a.receiver.is_blocked, "the hop to be free again")
