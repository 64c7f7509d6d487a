"""Evaluations of a run: on held-out prompts, by a live worker, with one version.

A failing one is told, and stops nothing unless `eval.on_failure` says so. Each is asked for before its version is there, so
that the worker holds that version as soon as it has it.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from laminar.cluster.crew import Crew
from laminar.cluster.ray_cluster import RoleDiedError
from laminar.config.root import LaminarConfig
from laminar.errors import DeadlineError, LaminarError, RunFailedError
from laminar.json_lines import iterate_lines
from laminar.scores import EvaluationReport
from laminar.telemetry.stream import TelemetryWriter

RETRY_SECONDS = 0.5


class Evaluations:
    """The evaluations before, during and after training.

    Args:
        config: the run's settings.
        held_out: encoded prompts; none switches evaluation off.
        metrics: the run's `metrics.jsonl`, which knows what earlier lives evaluated.
    """

    def __init__(
        self,
        config: LaminarConfig,
        held_out: list[bytes],
        metrics: Path,
        crew: Crew,
        telemetry: TelemetryWriter,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._held_out = config.eval, held_out
        self._patience_seconds = config.run.no_progress_seconds
        self._crew, self._telemetry, self._say = crew, telemetry, say
        self._evaluated: set[int] = set()
        self._trained = 0
        for line in iterate_lines(metrics):
            self._trained = max(self._trained, int(line["step"]))
            if line["kind"] == "evaluation":
                self._evaluated.add(int(line["step"]))
        self._reached = max(self._evaluated, default=0)
        """What is due comes after this version."""
        self._pending: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.wants_start = bool(held_out) and config.eval.at_start and not self._evaluated and not self._trained
        self.wants_end = bool(held_out) and config.eval.at_end

    async def evaluate_start(self) -> None:
        """Evaluate the version that workers start with."""
        await self._evaluate(0, self._config.timeout_seconds)

    async def run(self) -> None:
        """Evaluate every `eval.every_steps` versions, until cancelled; returns at once if there are none to evaluate.

        Consumes: versions that a worker holds. Produces: evaluations. Waits for: the next version that is due.
        """
        every = self._config.every_steps
        if not self._held_out or every is None:
            return
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                due = (self._reached // every + 1) * every
                if due not in self._pending:
                    self._pending[due] = group.create_task(self._evaluate_due(due))
                await self._changed.wait()

    def rewind(self, step: int) -> None:
        """The trainer stands at this step again: later versions are made anew, and are evaluated again when they are due."""
        self._trained = min(self._trained, step)
        self._evaluated = {number for number in self._evaluated if number <= step}
        if self._reached > step:
            self._reached = max(self._evaluated, default=0)
            self._changed.set()

    async def finish(self, step: int) -> None:
        """Evaluate the last version, if that is wanted and has not happened; an evaluation that is due ends first."""
        if due := [task for number, task in self._pending.items() if number <= step]:
            await asyncio.wait(due)
        if self.wants_end and step not in self._evaluated:
            await self._evaluate(step, self._config.timeout_seconds)

    async def _evaluate_due(self, number: int) -> None:
        """Evaluate a version that is yet to come; workers may die, and the run may pause, before it is there.

        Whatever became of it, it stands for all that earlier lives have left out.
        """
        while True:
            try:
                await self._evaluate(number, self._patience_seconds, is_due_later=True)
                break
            except (RoleDiedError, DeadlineError):  # its worker died, or the version did not come yet
                await asyncio.sleep(RETRY_SECONDS)
        del self._pending[number]
        self._reached = max(self._reached, number, self._trained, *self._evaluated)
        self._changed.set()

    async def _evaluate(self, min_number: int, wait_seconds: float, *, is_due_later: bool = False) -> None:
        """Evaluate one version of at least this number.

        Raises:
            RunFailedError: it failed, and the run is to stop then.
        """
        try:
            result = await self._crew.evaluate(self._held_out, min_number, wait_seconds)
            report: EvaluationReport = result.report(self._config)
        except (LaminarError, TimeoutError) as error:
            if is_due_later and isinstance(error, RoleDiedError | DeadlineError):
                raise
            text = f"evaluation failed: {str(error) or 'no worker answered in time'}"
            self._say(text)
            await self._telemetry.emit("notice", fields={"text": text})
            if self._config.on_failure == "stop":
                raise RunFailedError(f'{text} (eval.on_failure is "stop")') from error
            return
        self._evaluated.add(report.version_number)
        self._say(describe(report))
        metrics = report.metrics() | {"time/evaluation_seconds": result.seconds}
        await self._telemetry.emit("evaluation", metrics, fields={"step": report.version_number})


def describe(report: EvaluationReport) -> str:
    """One line for people."""
    mean = report.mean
    spread = "" if mean.low is None else f" (95 %: {mean.low:.3f} to {mean.high:.3f})"
    further = [f"pass@{k} {estimate.value:.3f}" for k, estimate in report.pass_at.items() if k > 1]
    failed = f", {report.num_failed} failed" if report.num_failed else ""
    parts = "; ".join([f"held-out accuracy at version {report.version_number}: {mean.value:.3f}{spread}", *further])
    return f"{parts}; {report.num_prompts} prompts{failed}"
