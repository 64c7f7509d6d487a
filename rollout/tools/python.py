"""Tool `python`: run a program in the sandbox, and read what it printed."""

from collections.abc import Sequence
from dataclasses import replace

from laminar.config.section import Section
from rollout.sandbox.containers import Container, shared_pool
from rollout.sandbox.run import Ended, Limits, Outcome, python_program, run
from rollout.tools.base import Tool, tool_from_function


class Python:
    """Gives one tool, `python(code)`; every call is a new process in a new folder."""

    tool_name = "python"

    class Options(Section):
        """Settings of `python`."""

        limits: Limits = Limits()
        """What one program may use."""
        container: Container | None = None
        """Run programs in containers instead of processes of this machine: `{ image = "python:3.11-slim" }`."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def open(self) -> Sequence[Tool]:
        """The tool."""
        return [replace(tool_from_function(Python.python), call=self.python)]

    async def close(self) -> None:
        """Nothing outlives a call."""

    async def python(self, code: str) -> str:
        """Run a Python program and read what it prints.

        Args:
            code: the whole program; print what you want to know.
        """
        options, program = self._options, python_program(code)
        if options.container is not None:
            return as_told(await shared_pool(options.container, options.limits).run(program))
        return as_told(await run(program, options.limits))


def as_told(outcome: Outcome) -> str:
    """What the policy reads of a program's end: its output, its errors, and why it ended if not by itself."""
    ending = {
        Ended.EXIT: "" if outcome.code == 0 else f"exit code {outcome.code}",
        Ended.SIGNAL: f"ended by signal {outcome.code}",
    }.get(outcome.ended, f"stopped: it used up its limit of {outcome.ended}")
    return "\n".join(part.rstrip("\n") for part in (outcome.output, outcome.errors, ending) if part) or "(no output)"
