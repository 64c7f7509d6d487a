"""`laminar logs`: the last lines of all roles, in order of time."""

import pytest

from laminar.cli.logs import find_logs, last_lines, tail
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


def test_only_the_last_lines_are_read_however_small_the_blocks(folder):
    file = folder.logs / "long.log"
    file.write_text("".join(f"line {i}\n" for i in range(1000)))
    for block_bytes in (1, 7, 1 << 16):
        assert tail(file, 3, block_bytes) == ["line 997", "line 998", "line 999"]


def test_a_role_without_a_log_is_refused_with_the_names_that_are_there(folder):
    with pytest.raises(ConfigError, match="no log of relay-7; there are: rollout-0, trainer-0"):
        find_logs(folder, "relay-7")
