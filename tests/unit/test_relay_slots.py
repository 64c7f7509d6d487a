import os
from mmap import PAGESIZE
from pathlib import Path

import pytest

from laminar.config.sizes import BESIDE_SLOT_BYTES, slot_bytes
from laminar.errors import EnvironmentSetupError
from laminar.types import WeightVersion
from relay.slots import check_space, open_slots, required_bytes
from relay.store import kept_versions


def versions(*texts: str) -> list[WeightVersion]:
    return [WeightVersion.parse(text) for text in texts]


def test_required_bytes_counts_kept_one_being_written_and_one_a_mapping_reader():
    assert required_bytes(8192, keep_versions=1, mapping_readers=0) == 2 * (8192 + BESIDE_SLOT_BYTES)
    assert required_bytes(8192, keep_versions=2, mapping_readers=3) == 6 * (8192 + BESIDE_SLOT_BYTES)


def test_a_slot_takes_whole_pages():
    assert [slot_bytes(length) - BESIDE_SLOT_BYTES for length in (1, PAGESIZE, PAGESIZE + 1)] == [
        PAGESIZE,
        PAGESIZE,
        2 * PAGESIZE,
    ]


@pytest.mark.parametrize(
    ("complete", "keep", "expected"),
    [
        ((), 1, ()),
        (("0.1", "0.3", "0.2"), 1, ("0.3",)),
        (("0.1", "0.3", "0.2"), 2, ("0.3", "0.2")),
        (("0.9", "0.10"), 1, ("0.10",)),
        (("0.8", "0.9", "1.4"), 3, ("1.4",)),
        (("0.8", "1.4", "1.5"), 2, ("1.5", "1.4")),
    ],
)
def test_newest_of_the_newest_lineage_are_kept(complete, keep, expected):
    assert kept_versions(versions(*complete), keep) == versions(*expected)


def test_too_little_space_names_both_figures_and_the_remedy(tmp_path):
    with pytest.raises(
        EnvironmentSetupError, match=r"need 1,000,000,000,000,000 bytes in .* are free: .*--shm-size.*relay\.root"
    ):
        check_space(tmp_path, 10**15)


def test_root_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(EnvironmentSetupError, match="is not a folder"):
        check_space(tmp_path / "missing", 0)


def test_slots_are_refused_before_anything_is_allocated(tmp_path):
    with pytest.raises(EnvironmentSetupError):
        open_slots(tmp_path, 2, 10**15)
    assert list(tmp_path.iterdir()) == []


def test_slots_are_allocated_at_full_length(tmp_path):
    slots = open_slots(tmp_path, 2, 10_000)
    assert [os.stat(slot.path).st_size for slot in slots] == [10_000, 10_000]
    assert all(os.stat(slot.path).st_blocks * 512 >= 10_000 for slot in slots)


def test_slots_that_fit_are_reused_and_others_replaced(tmp_path):
    first = open_slots(tmp_path, 2, 10_000)
    (tmp_path / "9.safetensors").write_bytes(b"left over")
    first[1].path.write_bytes(b"of another length")
    second = open_slots(tmp_path, 2, 10_000)
    assert second[0].inode == first[0].inode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]
    assert os.stat(second[1].path).st_size == 10_000


def test_free_memory_bounds_a_memory_file_system():
    shared = Path("/dev/shm")
    available = next(
        int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    with pytest.raises(EnvironmentSetupError):
        check_space(shared, available)
