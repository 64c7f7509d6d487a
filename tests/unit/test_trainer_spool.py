"""The replay spool: what is committed is read back as it was; what is torn, flipped or foreign is found and named."""

import logging
import struct

import pytest

from laminar.errors import ConfigError, EnvironmentSetupError
from laminar.experience.answers import Frontier
from laminar.types import (
    Chain,
    FinishReason,
    Purpose,
    SamplingParameters,
    Trajectory,
    WeightVersion,
    given,
    sampled,
    trajectory_id,
)
from trainer.audit import audit, audit_run
from trainer.checkpoint_folder import begin, complete, find_latest, oldest_step
from trainer.progress import Progress
from trainer.spool import HistoryEntry, ReplaySpool
from trainer.spool_file import SpooledGroup, SpooledStep, SpoolError, read_header

GROUPS_PER_STEP, GROUP_SIZE = 2, 3


def make_trajectory(group_id, member):
    chain = Chain((given([1, 2]), sampled([7, 8, 9], [-0.5, -0.25, -1.0], WeightVersion(0, member))))
    return Trajectory(
        trajectory_id(group_id, member), group_id, "p", member, 1, Purpose.TRAIN, SamplingParameters(1.0, 8, 0), (chain,),
        FinishReason.STOP, float(member),
    )  # fmt: skip


def make_step(step):
    """Step n plays prompts 2n-2 and 2n-1; the cursor stands behind them."""
    first = GROUPS_PER_STEP * (step - 1)
    places = range(first, first + GROUPS_PER_STEP)
    groups = tuple(tuple(make_trajectory(f"{place:08d}", member) for member in range(GROUP_SIZE)) for place in places)
    header = SpooledStep(
        progress=Progress(lineage=2, step=step, trained_tokens=10.5 * step, step_seconds=0.25, skipped_steps=1),
        frontier=Frontier(lineage=2, number=step, cursor=first + GROUPS_PER_STEP, next_admission=99),
        batch=f"digest-{step}",
        groups=tuple(SpooledGroup(f"{place:08d}", (0, place, 0)) for place in places),
    )
    return header, groups


@pytest.fixture
def spool(tmp_path):
    return ReplaySpool(tmp_path)


def commit(spool, *steps):
    for step in steps:
        spool.commit(*make_step(step))


def damage(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_committed_step_is_read_back_as_it_was(spool):
    header, groups = make_step(7)
    length = spool.commit(header, groups)
    assert spool.path(7).stat().st_size == length
    assert spool.read(7) == groups
    found = read_header(spool.path(7))
    assert (found.progress, found.frontier, found.batch) == (header.progress, header.frontier, header.batch)
    assert [(g.group_id, g.occurrence) for g in found.groups] == [("00000012", (0, 12, 0)), ("00000013", (0, 13, 0))]


def test_the_unbroken_row_after_a_checkpoint_is_replayed(spool):
    commit(spool, 1, 2, 3, 4, 6)
    assert [header.step for header in spool.find_replayable(2)] == [3, 4]
    assert [header.step for header in spool.find_replayable(4)] == []


@pytest.mark.parametrize("place", [1, 30, -1])
def test_one_flipped_byte_ends_the_row_and_is_named(spool, place, caplog):
    commit(spool, 1, 2, 3)
    damage(spool.path(2), place)
    with caplog.at_level(logging.WARNING, logger="laminar"):
        assert [header.step for header in spool.find_replayable(0)] == [1]
    assert "step_000002" in caplog.text
    assert "generated and trained anew" in caplog.text


@pytest.mark.parametrize("length", [0, 10, 100, -1])
def test_a_torn_file_ends_the_row(spool, length):
    commit(spool, 1, 2)
    whole = spool.path(2).read_bytes()
    spool.path(2).write_bytes(whole[:length])
    assert [header.step for header in spool.find_replayable(0)] == [1]
    with pytest.raises(SpoolError, match="step_000002"):
        spool.read(2)


def test_a_write_that_was_killed_leaves_nothing_to_replay_and_the_next_one_replaces_it(spool):
    commit(spool, 1)
    spool.path(2).with_suffix(".tmp").write_bytes(b"LMSP half")
    assert spool.steps() == [1]
    commit(spool, 2)
    assert [header.step for header in spool.find_replayable(0)] == [1, 2]
    assert [path.name for path in sorted(spool.path(1).parent.iterdir())] == ["step_000001", "step_000002"]


def test_another_format_version_is_refused_not_removed(spool):
    commit(spool, 1)
    data = bytearray(spool.path(1).read_bytes())
    data[4:8] = struct.pack("<I", 2)
    spool.path(1).write_bytes(data)
    with pytest.raises(ConfigError, match="format version 2, but this program reads 1"):
        spool.find_replayable(0)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "replay").write_text("a file")
    with pytest.raises(EnvironmentSetupError, match=r"step_000001 could not be written .*make room, then resume"):
        ReplaySpool(tmp_path).commit(*make_step(1))


def test_steps_that_do_not_follow_are_removed_before_they_are_trained_anew(spool):
    commit(spool, 1, 2, 4, 5)
    spool.remove_above(2)
    assert spool.steps() == [1, 2]


def test_pruned_steps_stay_in_the_history(spool):
    commit(spool, 1, 2, 3)
    spool.prune(2)
    spool.prune(2)
    assert spool.steps() == [3]
    assert spool.history() == [
        HistoryEntry(step, f"digest-{step}", ((0, 2 * step - 2), (0, 2 * step - 1))) for step in (1, 2, 3)
    ]


def test_a_kill_between_the_history_line_and_the_file_counts_the_step_once(spool):
    commit(spool, 1, 2)
    copy = spool.path(1).read_bytes()
    spool.prune(1)
    spool.path(1).write_bytes(copy)
    assert [entry.step for entry in spool.history()] == [1, 2]
    spool.prune(2)
    assert [entry.step for entry in spool.history()] == [1, 2]


def test_a_torn_line_of_the_history_is_written_again(spool):
    commit(spool, 1, 2)
    spool.prune(1)
    log = spool.path(1).with_name("history.jsonl")
    log.write_bytes(log.read_bytes() + b'{"step":2,"ba')
    assert [entry.step for entry in spool.history()] == [1, 2]
    spool.prune(2)
    assert [entry.step for entry in spool.history()] == [1, 2]


class TestCaseD25OnTheUnitOfCheckpointAndSpool:
    """Checkpoint 10 is complete and kept with 20; a kill at any point of saving 20, steps spooled on and on."""

    def save(self, root, step, keep=2, extra='{"frontier": {"number": 10, "cursor": 20}}'):
        (begin(root, step) / "extra.json").write_text(extra)
        return complete(root, step, {}, keep)

    def resume(self, root):
        """Where a resume would start, and what it would replay."""
        spool, latest = ReplaySpool(root), find_latest(root)
        start = 0 if latest is None else int(latest.name[-6:])
        return start, [header.step for header in spool.find_replayable(start)]

    def test_killed_before_any_file_of_the_checkpoint(self, tmp_path, spool):
        commit(spool, *range(1, 21))
        self.save(tmp_path, 10)
        begin(tmp_path, 20)
        assert self.resume(tmp_path) == (10, list(range(11, 21)))

    def test_killed_between_the_checkpoint_and_the_pruning(self, tmp_path, spool):
        commit(spool, *range(1, 21))
        self.save(tmp_path, 10)
        self.save(tmp_path, 20)
        assert self.resume(tmp_path) == (20, [])
        assert oldest_step(tmp_path) == 10

    def test_after_the_pruning_an_older_checkpoint_still_replays_forward(self, tmp_path, spool):
        commit(spool, *range(1, 23))
        self.save(tmp_path, 10)
        newest = self.save(tmp_path, 20)
        spool.prune(oldest_step(tmp_path))
        assert self.resume(tmp_path) == (20, [21, 22])
        (newest / "extra.json").write_text("damaged")
        assert self.resume(tmp_path) == (10, list(range(11, 23)))

    def test_killed_in_the_first_steps_everything_is_replayed_from_the_model(self, tmp_path, spool):
        commit(spool, 1, 2, 3)
        assert self.resume(tmp_path) == (0, [1, 2, 3])
        assert audit_run(tmp_path, 100).num_steps == 3

    def test_the_audit_reads_history_and_spool_together(self, tmp_path, spool):
        commit(spool, *range(1, 13))
        self.save(tmp_path, 10)
        spool.prune(oldest_step(tmp_path))
        found = audit_run(tmp_path, 100)
        assert (found.num_steps, found.missing_steps, found.twice, found.unaccounted) == (12, (), (), ())


def test_the_audit_names_what_was_trained_twice_and_what_was_lost():
    history = [HistoryEntry(1, "a", ((0, 0), (0, 1))), HistoryEntry(3, "b", ((0, 1), (1, 0)))]
    frontier = Frontier(number=3, epoch=1, cursor=2, pending=((0, 2, 1),))
    found = audit(history, frontier, num_prompts=4)
    assert (found.num_steps, found.missing_steps) == (2, (2,))
    assert found.twice == ((0, 1),)
    assert found.unaccounted == ((0, 3), (1, 1))


def test_a_history_that_finds_the_disk_full_names_the_remedy_and_forgets_no_step(spool, disk_limit):
    commit(spool, 1, 2)
    with (
        disk_limit(10),
        pytest.raises(EnvironmentSetupError, match=r"history.jsonl could not be .*; make room, then"),
    ):
        spool.prune(2)
    assert [entry.step for entry in spool.history()] == [1, 2]
    spool.prune(2)
    assert (spool.steps(), [entry.step for entry in spool.history()]) == ([], [1, 2])


def test_a_step_that_finds_the_disk_full_leaves_nothing_behind(spool, tmp_path, disk_limit):
    with disk_limit(100), pytest.raises(EnvironmentSetupError):
        commit(spool, 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    commit(spool, 1)
