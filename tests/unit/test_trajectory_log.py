"""Trajectory records: sampled by group, appended, torn ends passed over, bounded, found again."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from laminar.trajectories import TrajectoryFolder, append_step
from laminar.types import FailureKind
from rollout.scripted import CodePointTokenizer
from rollout.trajectory_log import TrajectoryLog, is_sampled


@pytest.fixture
def log(tmp_path):
    return TrajectoryLog(tmp_path, "rollout-0", CodePointTokenizer(), rate=1.0, max_bytes=10**6)


def test_a_record_comes_back_with_its_tokens_versions_and_logprobs(log, tmp_path, trajectory_maker):
    log.add(trajectory_maker.play("00000003", 1, "0.4", "0.5", reward=0.5))
    log.write()
    folder = TrajectoryFolder(tmp_path)
    (summary,) = folder.summaries()
    assert (summary.trajectory_id, summary.reward, summary.num_sampled_tokens) == ("00000003-001", 0.5, 6)
    assert (summary.oldest, summary.newest, summary.step, summary.staleness) == (4, 5, None, None)
    record = folder.read(summary)
    given, first, second = record["chains"][0]
    assert (given["version"], given["tokens"], given["logprobs"]) == (None, ["\x01", "\x02"], None)
    assert (first["version"], first["token_ids"], first["logprobs"]) == ("0.4", [7, 8, 9], [-0.5, -0.25, -1.0])
    assert second["version"] == "0.5"
    assert json.loads(json.dumps(record)) == record


def test_a_step_that_trained_the_group_gives_the_record_its_staleness(log, tmp_path, trajectory_maker):
    log.add(trajectory_maker.play("00000003", 0, "0.4"))
    log.add(trajectory_maker.break_down("00000003", 1, FailureKind.TOOL))
    log.write()
    folder = TrajectoryFolder(tmp_path)
    assert {s.step for s in folder.summaries()} == {None}
    append_step(tmp_path, 7, {"00000003": 1})
    good, failed = sorted(folder.summaries(), key=lambda s: s.trajectory_id)
    assert (good.step, good.staleness) == (7, 2)  # step 7 is trained on version 6
    assert (failed.step, failed.failure) == (None, "tool: took too long")


def test_a_torn_end_is_passed_over_and_read_once_it_is_whole(log, tmp_path, trajectory_maker):
    log.add(trajectory_maker.play("a", 0, "0.0"))
    log.write()
    log.add(trajectory_maker.play("b", 0, "0.0"))
    log.write()
    (path,) = tmp_path.glob("*.jsonl.gz")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    folder = TrajectoryFolder(tmp_path)
    assert [s.group_id for s in folder.summaries()] == ["a"]
    path.write_bytes(whole)
    assert sorted(s.group_id for s in folder.summaries()) == ["a", "b"]
    assert folder.read(folder.find("b-000"))["group_id"] == "b"


def test_a_member_torn_by_a_kill_costs_none_after_it(log, tmp_path, trajectory_maker):
    ends = []
    for group in "abcd":
        log.add(trajectory_maker.play(group, 0, "0.0"))
        log.write()
        (path,) = tmp_path.glob("*.jsonl.gz")
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for missing in range(1, ends[1] - ends[0], 7):
        path.write_bytes(whole[: ends[1] - missing] + whole[ends[1] :])
        folder = TrajectoryFolder(tmp_path)
        assert sorted(s.group_id for s in folder.summaries()) == ["a", "c", "d"]
        assert folder.read(folder.find("c-000"))["group_id"] == "c"


def test_records_that_find_the_disk_full_cost_none_after_them(log, tmp_path, trajectory_maker, disk_limit):
    log.add(trajectory_maker.play("a", 0, "0.0"))
    log.write()
    (path,) = tmp_path.glob("*.jsonl.gz")
    log.add(trajectory_maker.play("b", 0, "0.0"))
    with disk_limit(path.stat().st_size + 50):
        log.write()
    log.add(trajectory_maker.play("c", 0, "0.0"))
    log.write()
    assert sorted(s.group_id for s in TrajectoryFolder(tmp_path).summaries()) == ["a", "c"]
    assert log.left_out == 1


def test_a_torn_step_costs_no_step_after_it(log, tmp_path, trajectory_maker):
    log.add(trajectory_maker.play("c", 0, "0.4"))
    log.write()
    append_step(tmp_path, 6, {"a": 1})
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 7, "grou')
    append_step(tmp_path, 8, {"c": 1})
    (summary,) = TrajectoryFolder(tmp_path).summaries()
    assert (summary.step, summary.staleness) == (8, 3)


@pytest.mark.parametrize(
    "odd", [b"not json", b"\xff\xfe", b"12", b"{}", b'{"format_version": 2}', b'{"format_version": 1, "chains": 3}']
)
def test_a_line_of_another_shape_costs_no_record_and_no_step(log, tmp_path, trajectory_maker, odd):
    log.add(trajectory_maker.play("a", 0, "0.4"))
    log.write()
    (path,) = tmp_path.glob("*.jsonl.gz")
    path.write_bytes(gzip.compress(odd + b"\n") + path.read_bytes())
    log.add(trajectory_maker.play("b", 0, "0.4"))
    log.write()
    (tmp_path / "steps.jsonl").write_bytes(odd + b'\n{"step": 3, "groups": 4}\n')
    append_step(tmp_path, 7, {"a": 1})
    folder = TrajectoryFolder(tmp_path)
    assert {(s.group_id, s.step) for s in folder.summaries()} == {("a", 7), ("b", None)}
    assert folder.read(folder.find("b-000"))["group_id"] == "b"


@pytest.mark.parametrize("looked_at", [20, 60])
def test_steps_that_were_cut_and_have_grown_between_two_looks_are_all_read(log, tmp_path, trajectory_maker, looked_at):
    folder = TrajectoryFolder(tmp_path)
    for step in range(looked_at):
        append_step(tmp_path, step, {f"{step:08d}": 1}, max_bytes=4000)
    log.add(trajectory_maker.play("00000010", 0, "0.0"))
    log.write()
    folder.summaries()
    for step in range(looked_at, 130):
        append_step(tmp_path, step, {f"{step:08d}": 1}, max_bytes=4000)
        log.add(trajectory_maker.play(f"{step:08d}", 0, "0.0"))
    log.write()
    steps = {s.group_id: s.step for s in folder.summaries()}
    kept = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert 10 not in kept
    assert steps["00000010"] == 10
    assert all(steps[f"{step:08d}"] == step for step in kept)


def test_old_files_go_when_the_folder_is_full_and_are_forgotten(tmp_path, trajectory_maker):
    log = TrajectoryLog(tmp_path, "rollout-0", CodePointTokenizer(), rate=1.0, max_bytes=4000)
    folder = TrajectoryFolder(tmp_path)
    for number in range(60):
        log.add(trajectory_maker.play(f"{number:08d}", 0, "0.0"))
        log.write()
        folder.summaries()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.gz")) < 5500
    kept = [s.group_id for s in folder.summaries()]
    assert "00000059" in kept
    assert "00000000" not in kept


def test_groups_are_sampled_whole_and_at_the_rate():
    kept = [group for group in map(str, range(4000)) if is_sampled(group, 0.25)]
    assert 900 < len(kept) < 1100
    assert kept == [group for group in map(str, range(4000)) if is_sampled(group, 0.25)]
    assert not any(is_sampled(str(i), 0.0) for i in range(100))


def test_what_comes_too_fast_is_left_out_and_counted(log, trajectory_maker):
    for number in range(600):
        log.add(trajectory_maker.play(str(number), 0, "0.0"))
    assert log.left_out == 88  # 512 wait


def test_a_full_disk_costs_records_not_the_run(tmp_path, trajectory_maker):
    (tmp_path / "file").write_text("")
    log = TrajectoryLog(tmp_path / "file", "w", CodePointTokenizer(), rate=1.0, max_bytes=10**6)
    log.add(trajectory_maker.play("a", 0, "0.0"))
    log.write()
    assert log.left_out == 1


def test_looks_of_several_threads_at_once_see_each_record_once(log, tmp_path, trajectory_maker):
    for number in range(400):
        log.add(trajectory_maker.play(f"{number:08d}", 0, "0.0"))
    log.write()
    folder = TrajectoryFolder(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        seen = list(threads.map(lambda _: len(folder.summaries()), range(8)))
    assert seen == [400] * 8
