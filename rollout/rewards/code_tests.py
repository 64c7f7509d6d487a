"""Reward `code_tests`: the share of tests that the answer's program passes, each run in the sandbox.

A program that crashes, loops or is stopped at a limit has failed its test; a sandbox that cannot be built is a failure of
the verifier. Asserts have passed only if they were reached and ran to their end: a program that exits before them, or under
them, has failed. A program that looks for the judge's secret in its own process can still find it.
"""

import re
import secrets
from pathlib import Path
from typing import Any

from pydantic import Field

from laminar.config.section import Section
from laminar.types import FailureKind, Prompt
from rollout.boundary import EpisodeError
from rollout.rewards.base import RewardContext
from rollout.sandbox.containers import Container, shared_pool
from rollout.sandbox.run import GRACE_SECONDS, Limits, Outcome, Program, python_program, run

_BLOCK = re.compile(r"```[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)```", re.DOTALL)
_PYTHON_TAGS = ("python", "python3", "py", "py3")
_JUDGE = Path(__file__).with_name("judged_program.py")


class CodeTests:
    """Runs Python programs."""

    class Options(Section):
        """Settings of `code_tests`."""

        tests_field: str = "tests"
        """Data column with a list of tests: `{"input": stdin, "output": stdout}`, or `{"code": asserts}` run behind it."""
        all_or_nothing: bool = True
        """1 if all tests pass, else 0; false: the share of those that pass."""
        num_parallel: int = Field(2, ge=1)
        """Programs that one worker runs at once."""
        limits: Limits = Limits()
        """What one program may use."""
        container: Container | None = None
        """Run programs in containers instead of processes of this machine: `{ image = "python:3.11-slim" }`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.max_running = options.num_parallel  # an answer runs one program at a time

    def check_prompt(self, prompt: Prompt) -> str | None:
        """What keeps this prompt from being judged."""
        tests = prompt.fields.get(self._options.tests_field)
        if isinstance(tests, list) and tests and all(_is_test(test) for test in tests):
            return None
        return (
            f"prompt {prompt.prompt_id}: column {self._options.tests_field!r} is {tests!r:.80}; give a list of "
            '{"input": text, "output": text} or {"code": text}'
        )

    def extra_seconds(self, context: RewardContext) -> float:
        """As long as all tests may take by their own limits: a slow program has failed, the verifier has not."""
        tests = context.prompt.fields.get(self._options.tests_field)
        return len(tests) * (self._options.limits.wall_seconds + GRACE_SECONDS) if isinstance(tests, list) else 0.0

    async def score(self, context: RewardContext) -> float:
        """Between 0.0 and 1.0."""
        if problem := self.check_prompt(context.prompt):
            raise EpisodeError(FailureKind.USER_BUG, problem)
        code, tests = extract_code(context.completion), context.prompt.fields[self._options.tests_field]
        passed = 0
        for test in tests:
            is_passed = await self._passes(code, test)
            passed += is_passed
            if self._options.all_or_nothing and not is_passed:
                return 0.0
        return passed / len(tests)

    async def _passes(self, code: str, test: dict[str, str]) -> bool:
        secret = secrets.token_hex(16) if "code" in test else ""
        try:
            outcome = await self._run(_program(code, test, secret))
        except EpisodeError as error:
            raise EpisodeError(FailureKind.VERIFIER, error.failure.text) from error
        reached = outcome.is_success and secret in outcome.errors
        return reached and ("output" not in test or _lines(outcome.output) == _lines(test["output"]))

    async def _run(self, program: Program) -> Outcome:
        options = self._options
        if options.container is not None:
            return await shared_pool(options.container, options.limits).run(program)
        return await run(program, options.limits)


def _program(code: str, test: dict[str, str], secret: str) -> Program:
    """The answer as it is, or, under asserts, `judged_program.py`, which tells the secret once they have held."""
    if not secret:
        return python_program(f"{code}\n", stdin=test.get("input", ""))
    files = {"solution.py": code, "asserts.py": test["code"], "secret": secret}
    return python_program(_JUDGE.read_text(), stdin=test.get("input", ""), files=files)


def extract_code(completion: str) -> str:
    """The last block of Python in the answer; without one the last block that names no language; else the whole answer."""
    blocks = [(tag.lower(), text) for tag, text in _BLOCK.findall(completion)]
    tagged = [text for tag, text in blocks if tag in _PYTHON_TAGS]
    return [completion, *(text for tag, text in blocks if not tag), *tagged][-1]


def _is_test(test: Any) -> bool:
    if not isinstance(test, dict) or not all(isinstance(value, str) for value in test.values()):
        return False
    return "code" in test or "output" in test


def _lines(text: str) -> list[str]:
    """Lines without blanks at their ends, as judges of programming contests compare."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
