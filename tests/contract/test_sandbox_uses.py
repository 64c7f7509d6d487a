"""What runs in the sandbox: tool `python` and reward `code_tests`."""

import asyncio

import pytest

from laminar.types import FailureKind, Prompt
from rollout.boundary import EpisodeError
from rollout.rewards.base import RewardContext
from rollout.rewards.code_tests import CodeTests, extract_code
from rollout.rewards.scorer import RewardScorer, Term
from rollout.sandbox import run as sandbox
from rollout.sandbox.run import Limits
from rollout.tools.calls import Call
from rollout.tools.python import Python
from rollout.tools.toolbox import Toolbox

EASY = Limits(isolation="if_available", wall_seconds=60.0, cpu_seconds=20.0)


def judge(**options):
    return CodeTests(CodeTests.Options(limits=EASY, **options))


def context(code, tests):
    return RewardContext("t", Prompt("p", "?", {"tests": tests}), f"My program:\n```python\n{code}\n```\nIt works.")


ECHO = [{"input": "2 3", "output": "5\n"}, {"input": "1 1", "output": "2"}]


async def test_a_program_that_passes_all_tests_is_right_and_a_share_counts_where_asked_for():
    half = context("print(5)  ", ECHO)
    assert await judge(all_or_nothing=False).score(half) == 0.5


async def test_a_program_that_is_slow_in_every_test_is_wrong_and_the_verifier_has_not_failed():
    limits = Limits(isolation="if_available", wall_seconds=0.5)
    term = Term("tests", CodeTests(CodeTests.Options(limits=limits, all_or_nothing=False)), timeout_seconds=0.5)
    slow = await RewardScorer([term]).score(context("import time; time.sleep(60)", [*ECHO, *ECHO]))
    assert (slow.reward, slow.failure) == (0.0, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "tests", "score"),
    [
        ("print(sum(map(int, input().split())))", ECHO, 1.0),
        ("print(5)", ECHO, 0.0),
        ("def f(x): return x + 1", [{"code": "assert f(1) == 2"}], 1.0),
        ("def f(x): return x", [{"code": "assert f(1) == 2"}], 0.0),
        ("import sys; sys.exit(0)", [{"code": "assert False"}, {"output": "never"}], 0.0),
    ],
)
async def test_programs_are_judged_by_their_output_or_by_asserts(code, tests, score):
    assert await judge().score(context(code, tests)) == score


RIGHT, WRONG = "def f(x): return x + 1", "def f(x): return x"
HOLDS = "assert f(1) == 2"


@pytest.mark.parametrize(
    ("code", "asserts", "score"),
    [
        ("raise SystemExit(0)", HOLDS, 0.0),
        ("import os; os._exit(0)", HOLDS, 0.0),
        (f"{WRONG}\nimport sys\nif __name__ == '__main__': sys.exit(0)", HOLDS, 0.0),
        (f"{RIGHT}\nimport sys\nif __name__ == '__main__': sys.exit(int(input()))", HOLDS, 1.0),
        (f"{RIGHT}\nraise SystemExit(0)", HOLDS, 1.0),
        ("def f(x): raise SystemExit(0)", HOLDS, 0.0),
        ("def f(x): return len(sys.argv) + x", HOLDS, 0.0),
        ("import atexit, os; atexit.register(os._exit, 0)\n" + WRONG, HOLDS, 0.0),
        (RIGHT, "import sys; sys.exit(f(1) != 2)", 1.0),
        (
            "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int",
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(A(1).x, 1)\nunittest.main()",
            1.0,
        ),
        (WRONG, f"import unittest\nclass T(unittest.TestCase):\n    def test(self): {HOLDS}\nunittest.main()", 0.0),
    ],
)
async def test_asserts_have_passed_only_if_they_were_reached_and_ran_to_their_end(code, asserts, score):
    assert await judge().score(context(code, [{"code": asserts}])) == score


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints:\n```\n5\n```", "a\n"),
        ("```text\nplan\n```\nSo the program is:\n```python\na\n```\nDone.", "a\n"),
        ("```Python3\na\n```", "a\n"),
        ("1. First:\n   ```py title=x\n   a\n   ```", "   a\n   "),
        ("```python\na```", "a"),
        ("Here: ```python\na\n```\nDone.", "a\n"),
        ("> ```python\na\n```", "a\n"),
        ("```cpp\na\n```", "```cpp\na\n```"),
        ("print(1)", "print(1)"),
    ],
)
def test_the_last_block_of_python_is_the_program_or_else_the_whole_answer(answer, code):
    assert extract_code(answer) == code


@pytest.mark.parametrize("tests", [None, [], "x", [{"input": "1"}], [{"output": 1}]])
def test_a_prompt_without_tests_is_refused_at_start(tests):
    assert "column 'tests'" in judge().check_prompt(Prompt("p", "?", {} if tests is None else {"tests": tests}))


async def test_a_sandbox_that_cannot_be_built_is_a_failure_of_the_verifier(monkeypatch):
    monkeypatch.setattr(sandbox, "namespaces_available", lambda: False)
    with pytest.raises(EpisodeError) as caught:
        await CodeTests(CodeTests.Options()).score(context("", ECHO))
    assert caught.value.failure.kind is FailureKind.VERIFIER


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "told"),
    [("print(6 * 7)", "42"), ("x = 1", "(no output)"), ("while True: pass", "stopped: it used up its limit of cpu")],
)
async def test_the_python_tool_tells_what_happened(code, told):
    (tool,) = await Python(Python.Options(limits=EASY.model_copy(update={"cpu_seconds": 0.5}))).open()
    assert await tool.call(code=code) == told
    assert tool.schema["function"]["parameters"]["required"] == ["code"]


async def test_code_that_cannot_be_written_is_told_to_the_policy():
    box = Toolbox(["python"], 10.0, 400)
    await box.open()
    answer = await box.answer(Call("python", {"code": "print('\ud83d')"}))
    assert answer.text.startswith("error: file 'main.py' holds half of a character and cannot be written")
    assert not answer.is_result


@pytest.mark.slow
async def test_the_wait_for_other_programs_does_not_count_as_an_answers_time():
    options = CodeTests.Options(limits=Limits(isolation="if_available", wall_seconds=5.0), num_parallel=1)
    scorer = RewardScorer([Term("code", CodeTests(options), timeout_seconds=1.0)])
    codes = [*["while 1: pass"] * 3, "print(5)"]
    scores = await asyncio.gather(*(scorer.score(context(code, ECHO[:1])) for code in codes))
    assert [(score.reward, score.failure) for score in scores] == [(0.0, None)] * 3 + [(1.0, None)]


@pytest.mark.slow
async def test_the_python_tool_shows_errors():
    (tool,) = await Python(Python.Options(limits=EASY)).open()
    assert "ZeroDivisionError" in await tool.call(code="1 / 0")
