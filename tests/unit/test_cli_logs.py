"""`laminar logs`: the last lines of all roles, in order of time."""

import os
import time

import pytest

from laminar.cli.logs import Follower, end_of_lines, find_logs, last_lines, tail
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    run = RunFolder.create(tmp_path, "a")
    (run.logs / "trainer-0.log").write_text("2026-01-01 10:00:01,000 INFO a\nTraceback\n2026-01-01 10:00:04,000 INFO b\n")
    (run.logs / "rollout-0.log").write_text("2026-01-01 10:00:02,000 INFO c\n2026-01-01 10:00:03,000 INFO d\n")
    return run


def test_lines_of_all_roles_come_in_order_of_time_and_a_traceback_stays_with_its_line(folder):
    merged = last_lines(find_logs(folder, ""), 10)
    assert [(name, line.split()[-1]) for name, line in merged] == [
        ("trainer-0", "a"), ("trainer-0", "Traceback"), ("rollout-0", "c"), ("rollout-0", "d"), ("trainer-0", "b"),
    ]  # fmt: skip


def shown(folder, count):
    return [(name, line.split()[-1]) for name, line in last_lines(find_logs(folder, ""), count)]


def test_the_end_of_a_long_traceback_stays_behind_the_line_that_it_follows(folder):
    lines = "2026-01-01 10:00:05,000 ERROR e\n" + "".join(f"frame {i}\n" for i in range(40))
    (folder.logs / "relay-0.log").write_text(lines)
    assert shown(folder, 4) == [("relay-0", str(i)) for i in range(36, 40)]
    (folder.logs / "relay-0.log").write_text(lines.replace("10:00:05", "10:00:02"))
    assert shown(folder, 3) == [("rollout-0", "c"), ("rollout-0", "d"), ("trainer-0", "b")]


def test_what_a_role_said_before_its_first_stamp_comes_with_that(folder):
    (folder.logs / "relay-0.log").write_text("a warning of a library\n2026-01-01 10:00:02,500 INFO e\n")
    assert shown(folder, 4) == [("relay-0", "library"), ("relay-0", "e"), ("rollout-0", "d"), ("trainer-0", "b")]


def test_a_log_without_stamps_is_as_old_as_its_last_change(folder):
    log = folder.logs / "rollout-0-engine.log"
    log.write_text("listening\n")
    changed = time.mktime(time.strptime("2026-01-01 10:00:03", "%Y-%m-%d %H:%M:%S"))
    for seconds, place in ((-3600, 0), (0.5, 4), (3600, 5)):
        os.utime(log, (changed + seconds, changed + seconds))
        assert shown(folder, 10).index(("rollout-0-engine", "listening")) == place


def test_only_the_last_lines_are_read_however_small_the_blocks(folder):
    file = folder.logs / "long.log"
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    for block_bytes in (1, 7, 1 << 16):
        assert tail(file, 3, block_bytes) == ["line 997", "line 998", "line 999"]


def test_a_follower_gives_whole_lines_of_logs_that_grow_appear_begin_anew_and_go(folder):
    known = find_logs(folder, "")
    trainer, late = folder.logs / "trainer-0.log", folder.logs / "rollout-1.log"
    with trainer.open("a") as log:
        log.write("half ")
    follower = Follower({file: end_of_lines(file) for file in known})
    assert follower.new_lines(known) == []
    with trainer.open("a") as log:
        log.write("a ")
    late.write_text("one\ntwo\n")
    assert follower.new_lines([*known, late]) == [("rollout-1", "one"), ("rollout-1", "two")]
    with trainer.open("a") as log:
        log.write("line\nand half")
    late.unlink()
    assert follower.new_lines([*known, late]) == [("trainer-0", "half a line")]
    trainer.write_text("anew\n")
    assert follower.new_lines(known) == [("trainer-0", "anew")]


def test_a_role_without_a_log_is_refused_with_the_names_that_are_there(folder):
    with pytest.raises(ConfigError, match="no log of relay-7; there are: rollout-0, trainer-0"):
        find_logs(folder, "relay-7")
