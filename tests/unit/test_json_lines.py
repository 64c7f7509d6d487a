"""Lines that are appended: what tears one costs that one."""

import pytest

from laminar.json_lines import append_line, iterate_lines, read_lines


@pytest.mark.parametrize("torn", [b'{"a": 1', b'{"a": "\xc3', b"\0\0\0\0", b"12", b'{"a": 1}'])
def test_a_torn_end_costs_no_line_before_or_after_it(tmp_path, torn):
    path = tmp_path / "lines.jsonl"
    append_line(path, {"n": 1})
    with path.open("ab") as file:
        file.write(torn)
    assert append_line(path, {"n": 2}) == path.stat().st_size
    append_line(path, {"n": 3})
    assert [line["n"] for line in read_lines(path) if "n" in line] == [1, 2, 3]


def test_a_line_that_finds_the_disk_full_leaves_the_file_as_it_was(tmp_path, disk_limit):
    path = tmp_path / "lines.jsonl"
    append_line(path, {"n": 1})
    before = path.read_bytes()
    with disk_limit(len(before) + 100), pytest.raises(OSError, match="too large"):
        append_line(path, {"n": 2, "text": "x" * 1000})
    assert path.read_bytes() == before
    append_line(path, {"n": 3})
    assert read_lines(path) == [{"n": 1}, {"n": 3}]


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert list(iterate_lines(tmp_path / "none.jsonl")) == []
