"""Ranks of one machine fill one slot: shares that cover every byte, failures and silence that drop the version."""

import threading
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

from laminar.errors import DeadlineError, RelayError
from laminar.types import WeightVersion
from relay.manifest import load_layout
from relay.publisher import Publisher
from relay.share import AnnouncedSlots, Stretch, even_stretches, write_stretches
from relay.store import RANK, WEIGHTS_NAME, VersionStore
from trainer.shares import WeightShares

MODEL = [("a", torch.arange(21.0).view(3, 7)), ("b", torch.arange(5.0) + 100), ("c", torch.full((1,), 7.0))]
LAYOUT = load_layout(MODEL)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 28, 40])
def test_even_stretches_have_every_element_once_and_are_equal_but_for_one(num_ranks):
    shares = [even_stretches(MODEL, rank, num_ranks) for rank in range(num_ranks)]
    sizes = [sum(len(stretch.values) for stretch in share) for share in shares]
    assert sum(sizes) == 27
    assert max(sizes) - min(sizes) <= 1
    whole = {name: torch.full((tensor.numel(),), torch.nan) for name, tensor in MODEL}
    for stretch in (stretch for share in shares for stretch in share):
        place = whole[stretch.name][stretch.start : stretch.start + len(stretch.values)]
        assert place.isnan().all()
        place.copy_(stretch.values)
    assert all(torch.equal(whole[name], tensor.reshape(-1)) for name, tensor in MODEL)


class Machine:
    """A store, its publisher, and two ranks whose orders go from one to the other in this process."""

    def __init__(self, folder, *, own=None, seconds=30.0, layout=LAYOUT):
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        self.store, self.announced = VersionStore(folder, "run", "node", keep_versions=2), []
        self.publisher = Publisher(self.store, folder / "model")
        self.publisher.prepare(LAYOUT)
        messages, shares = HashStore(), [partial(even_stretches, MODEL, rank, 2) for rank in range(2)]
        self.ranks = [
            WeightShares(0, 2, messages, LAYOUT, shares[0], seconds),
            WeightShares(1, 2, messages, layout, own or shares[1], seconds),
        ]

    def publish(self, number, *, tell=True, until="visible"):
        def announce(order):
            self.announced.append(order)
            if tell:
                self.ranks[1].begin(order)

        fill = partial(self.ranks[0].fill, announce)
        return self.publisher.publish(WeightVersion(0, number), (), until=until, fill=fill)

    def bytes_of(self, number):
        return (self.store.folder_of(WeightVersion(0, number)) / WEIGHTS_NAME).read_bytes()


def test_two_shares_are_byte_for_byte_what_one_rank_writes(tmp_path):
    machine = Machine(tmp_path)
    assert machine.publish(1).bytes == LAYOUT.file_bytes
    machine.publisher.publish(WeightVersion(0, 2), MODEL)
    assert machine.bytes_of(1) == machine.bytes_of(2)


def test_a_stretch_is_cast_to_the_number_type_of_the_layout(tmp_path):
    layout = load_layout([(name, tensor.bfloat16()) for name, tensor in MODEL])
    (slot,) = VersionStore(tmp_path, "run", "node", keep_versions=1).prepare_slots(layout.file_bytes)[:1]
    written = write_stretches(slot, layout, even_stretches(MODEL, 0, 1))
    assert written == layout.file_bytes - len(layout.header)
    place = layout.tensors["a"]
    stored = torch.frombuffer(slot.buffer, dtype=torch.bfloat16, offset=place.offset, count=21)
    assert torch.equal(stored, MODEL[0][1].reshape(-1).bfloat16())


@pytest.mark.parametrize(
    "stretch",
    [Stretch("b", 3, torch.zeros(4)), Stretch("b", 0, torch.zeros(2, dtype=torch.int32)), Stretch("d", 0, torch.zeros(1))],
    ids=["too long", "whole numbers", "unknown"],
)
def test_a_share_that_does_not_fit_is_said_to_rank_0_and_the_version_is_dropped(stretch, tmp_path):
    machine = Machine(tmp_path, own=lambda: [stretch])
    with pytest.raises(RelayError, match=f"trainer rank 1 could not write its share: .*tensor '{stretch.name}'"):
        machine.publish(1)
    assert machine.store.versions() == []
    assert not machine.publisher.publish(WeightVersion(0, 2), MODEL).skipped  # the slot was given back


def test_shares_that_leave_a_gap_are_dropped(tmp_path):
    machine = Machine(tmp_path, own=list)
    with pytest.raises(RelayError, match=r"the ranks' shares have \d+ bytes, a version"):
        machine.publish(1)
    assert machine.store.versions() == []


def test_a_slot_of_another_length_is_left_alone(tmp_path):
    machine = Machine(tmp_path, layout=load_layout(MODEL[:2]))
    with pytest.raises(RelayError, match=r"trainer rank 1 could not write its share: RelayError: slot .* is not the file"):
        machine.publish(1)


def test_silence_ends_by_a_named_deadline_and_the_half_written_slot_has_no_name(tmp_path):
    machine = Machine(tmp_path, seconds=0.2)
    machine.publish(1)
    assert not machine.publish(2, tell=False, until="begun").skipped
    with pytest.raises(DeadlineError, match="the shares of trainer ranks 1 of a weight version"):
        machine.publisher.finish_copy()
    assert machine.store.versions() == [WeightVersion(0, 1)]
    machine.publish(3)
    assert machine.bytes_of(3) == machine.bytes_of(1)


def test_a_version_that_is_skipped_is_announced_to_nobody(tmp_path):
    machine = Machine(tmp_path)
    machine.publish(1)
    with machine.store.lease(WeightVersion(0, 1)):
        machine.publish(2)
        machine.publish(3)
        told = len(machine.announced)
        assert machine.publish(4).skipped
        assert len(machine.announced) == told
    assert not machine.publish(4).skipped


def test_a_rank_frees_its_weights_when_its_own_share_is_written_and_rank_0_when_all_are(tmp_path):
    gate = threading.Event()

    def own():
        assert gate.wait(30)
        yield from even_stretches(MODEL, 1, 2)

    machine = Machine(tmp_path, own=own)
    machine.publish(1, until="begun")
    assert machine.store.versions() == []
    gate.set()
    machine.ranks[1].finish()
    assert machine.publisher.finish_copy() > 0
    machine.publisher.settle()
    assert machine.store.versions() == [WeightVersion(0, 1)]


def test_no_publisher_begins_while_a_rank_of_an_older_one_lives(tmp_path):
    machine = Machine(tmp_path)
    slots, path = AnnouncedSlots(), next((machine.store.folder / "slots").iterdir())
    slots.open(path, path.stat().st_ino, LAYOUT.file_bytes)
    machine.publisher.close()
    with pytest.raises(RelayError, match="already has a living rank"):
        Publisher(machine.store, tmp_path / "model")
    with pytest.raises(RelayError, match="already has a living rank"):
        machine.store.hold(RANK)
    slots.close()
    Publisher(machine.store, tmp_path / "model").close()
    with machine.store.hold(RANK), pytest.raises(RelayError, match="this rank belongs to an older one"):
        AnnouncedSlots().open(path, path.stat().st_ino, LAYOUT.file_bytes)
