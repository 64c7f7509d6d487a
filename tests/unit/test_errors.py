"""What is told of an error is never empty."""

import pytest

from laminar.errors import first_line, reason


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TimeoutError(), "TimeoutError"),
        (AssertionError(" \n"), "AssertionError"),
        (KeyError("x"), "KeyError: 'x'"),
        (KeyError(), "KeyError"),
        (ValueError(" too long\n"), "too long"),
        (ValueError("too long\nby far"), "too long\nby far"),
    ],
)
def test_the_reason_of_an_error_is_its_text_and_else_its_kind(error, told):
    assert reason(error) == told


@pytest.mark.parametrize(("error", "told"), [(RuntimeError(), "RuntimeError"), (OSError("one\ntwo"), "one")])
def test_the_first_line_of_an_error_is_there_also_if_it_says_nothing(error, told):
    assert first_line(error) == told
