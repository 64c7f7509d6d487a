"""Tools: schemas from type hints, checked arguments, what the policy is told, what is a failure; the two built in."""

import json
import math
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from laminar.config.section import Plugin
from laminar.errors import ConfigError
from laminar.types import FailureKind
from rollout.boundary import EpisodeError
from rollout.tools.base import ToolError, tool_from_function
from rollout.tools.calculator import calculate
from rollout.tools.calls import Call
from rollout.tools.search import Corpus
from rollout.tools.toolbox import Toolbox


def book(
    city: str, nights: Annotated[int, Field(ge=1)] = 1, kind: Literal["hotel", "hut"] = "hut", tags: list[str] | None = None
):
    """Book a place to sleep.

    Not shown to the model.

    Args:
        city: where to, such as `Oslo`.
        nights (int): how many.

    Returns:
        A number.
    """
    return {"city": city, "nights": nights, "kind": kind, "tags": tags}


def test_a_schema_comes_from_hints_and_docstring():
    assert tool_from_function(book).schema == {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book a place to sleep.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where to, such as `Oslo`."},
                    "nights": {"type": "integer", "minimum": 1, "default": 1, "description": "how many."},
                    "kind": {"type": "string", "enum": ["hotel", "hut"], "default": "hut"},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None},
                },
                "required": ["city"],
            },
        },
    }


def test_arguments_are_checked_converted_and_filled_up():
    assert tool_from_function(book).check({"city": "Oslo", "nights": "3"}) == {
        "city": "Oslo", "nights": 3, "kind": "hut", "tags": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "city: Field required"),
        ({"city": "Oslo", "nights": 0}, "nights: .*greater than or equal to 1"),
        ({"city": "Oslo", "stars": 5}, "stars: Extra inputs"),
        ({"city": ["Oslo"]}, "city: .*string"),
    ],
)
def test_wrong_arguments_are_named(arguments, why):
    with pytest.raises(ToolError, match=why):
        tool_from_function(book).check(arguments)


def test_a_function_that_cannot_be_described_is_refused():
    def untyped(a):
        return a

    def many(*a: int):
        return a

    for function in (untyped, many):
        with pytest.raises(ConfigError, match=r"'a' needs a type hint"):
            tool_from_function(function)


# ---- the toolbox


def refuse(word: str) -> str:
    """Refuse."""
    raise KeyError(word)


async def later(word: str) -> str:
    """Answer."""
    return word * 3


def hang(word: str) -> str:
    """Hang."""
    RELEASE.wait(10)
    return word


def take_anything(value: Any) -> str:
    """Take anything."""
    return type(value).__name__


def break_down(word: str) -> str:
    """Break down."""
    raise OSError("the database is gone")


RELEASE = threading.Event()
HERE = __name__


class Counter:
    """A source whose tools share what lives as long as the episode."""

    closed = 0

    async def open(self):
        self.count = 0

        def up(by: int) -> int:
            """Count up."""
            self.count += by
            return self.count

        return [tool_from_function(up)]

    async def close(self):
        Counter.closed += 1


@pytest.fixture
def here(monkeypatch):
    """Makes this file importable as a user's module would be."""
    import sys

    monkeypatch.setitem(sys.modules, "agentic_tools_of_the_test", sys.modules[__name__])
    return "agentic_tools_of_the_test"


async def opened(*entries, seconds=10.0, max_characters=100):
    box = Toolbox(entries, seconds, max_characters)
    await box.open()
    return box


async def test_plain_and_async_functions_and_sources_answer(here):
    before = Counter.closed
    box = await opened("calculate", f"{here}:later", f"{here}:Counter")
    answers = [await box.answer(call) for call in (Call("calculate", {"expression": "3*4"}), Call("later", {"word": "a"}))]
    assert [(a.text, a.is_result) for a in answers] == [("12", True), ("aaa", True)]
    assert [(await box.answer(Call("up", {"by": 2}))).text for _ in range(2)] == ["2", "4"]
    await box.close()
    assert Counter.closed == before + 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call("fly", {}), "error: there is no tool 'fly', only refuse, later"),
        (Call("later", {}), "error: word: Field required"),
        (Call("refuse", {"word": "x"}), "error: 'x'"),
    ],
)
async def test_what_the_policy_did_wrong_is_told_to_it(here, call, text):
    answer = await (await opened(f"{here}:refuse", f"{here}:later")).answer(call)
    assert (answer.text, answer.is_result) == (text, False)


async def test_arguments_may_be_deep_and_hold_any_whole_character(here):
    deep = json.loads("[" * 500 + '"\\ud83d\\ude00"' + "]" * 500)
    box = await opened(f"{here}:later", f"{here}:take_anything")
    assert (await box.answer(Call("later", {"word": "é😀"}))).text == "é😀é😀é😀"
    assert (await box.answer(Call("take_anything", {"value": deep}))).text == "list"


async def test_a_tool_that_breaks_is_a_failure_of_kind_tool(here):
    with pytest.raises(EpisodeError, match="database is gone") as caught:
        await (await opened(f"{here}:break_down")).answer(Call("break_down", {"word": "x"}))
    assert caught.value.failure.kind is FailureKind.TOOL


async def test_a_tool_that_hangs_is_a_failure_of_kind_tool(here):
    with pytest.raises(EpisodeError, match=r"tool_seconds") as caught:
        await (await opened(f"{here}:hang", seconds=0.05)).answer(Call("hang", {"word": "x"}))
    RELEASE.set()
    assert caught.value.failure.kind is FailureKind.TOOL


async def test_a_long_result_is_cut_and_says_so(here):
    answer = await (await opened(f"{here}:later", max_characters=4)).answer(Call("later", {"word": "abc"}))
    assert answer.text == "abca\n(5 characters cut)"


async def test_two_tools_of_one_name_are_refused(here):
    with pytest.raises(ConfigError, match="two tools are called 'later'"):
        await opened(f"{here}:later", f"{here}:later")


# ---- calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 + 4 * 2", "11"),
        ("-(3 - 5) ** 2", "-4"),
        ("7 / 2", "3.5"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 0.5", str(math.sqrt(2))),
    ],
)
def test_the_calculator_knows_arithmetic(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x + 1",
        "__import__('os')",
        "9**9**9**9",
        "(-8) ** 0.5",
        "1; 2",
        "9" * 300,
        "(" * 150,
        "'a' * 3",
        "True + 1",
        "1 << 9",
    ],
)
def test_the_calculator_refuses_everything_else_at_once(expression):
    with pytest.raises(ToolError):
        calculate(expression)


@pytest.mark.parametrize("expression", ["1 / 0", "2.0 ** 10000"])
def test_arithmetic_errors_are_the_policys(expression):
    with pytest.raises(ArithmeticError):
        calculate(expression)


# ---- search


def test_passages_are_ranked_by_bm25():
    corpus = Corpus(["cat sat", "cat cat dog", "bird"])
    # Mean length 2. "cat": in two of three, log(1 + 1.5 / 2.5) = 0.4700; once in 2 words: 1 * 2.5 / (1 + 1.5) = 1;
    # twice in 3 words: 2 * 2.5 / (2 + 1.5 * 1.375) = 1.2308. "sat": log(1 + 2.5 / 1.5) = 0.9808.
    assert corpus.best("Cat?", 5) == ["cat cat dog", "cat sat"]
    assert corpus.best("cat sat", 5) == ["cat sat", "cat cat dog"]
    assert corpus.best("bird cat", 1) == ["bird"]
    assert corpus.best("fish", 5) == []


async def test_the_search_tool_reads_its_corpus_from_a_file(tmp_path):
    file = tmp_path / "passages.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("Oslo is in Norway.", "Bergen too.")))
    box = await opened(Plugin(kind="search", options={"path": str(file), "num_results": 1}))
    assert (await box.answer(Call("search", {"query": "where is oslo"}))).text == "[1] Oslo is in Norway."
    assert (await box.answer(Call("search", {"query": "Rome"}))).text == "nothing found"


async def test_a_corpus_without_text_is_refused(tmp_path):
    file = tmp_path / "passages.jsonl"
    file.write_text('{"body": "x"}\n')
    with pytest.raises(ConfigError, match="column `text`"):
        await opened(Plugin(kind="search", options={"path": str(file)}))
