"""Evaluations of a run: on held-out prompts, by a live worker, with one version. A failing one is told and stops nothing."""

from collections.abc import Callable
from pathlib import Path

from laminar.cluster.crew import Crew
from laminar.config.system import EvalConfig
from laminar.errors import LaminarError
from laminar.telemetry.files import read_lines
from laminar.telemetry.stream import TelemetryWriter


class Evaluations:
    """The evaluations around training.

    Args:
        config: `[eval]`.
        held_out: encoded prompts; none switches evaluation off.
        metrics: the run's `metrics.jsonl`, which knows what earlier lives evaluated.
    """

    def __init__(
        self,
        config: EvalConfig,
        held_out: list[bytes],
        metrics: Path,
        crew: Crew,
        telemetry: TelemetryWriter,
        say: Callable[[str], None],
    ) -> None:
        self._held_out, self._crew, self._telemetry, self._say = held_out, crew, telemetry, say
        evaluated = metrics.exists() and any(line["kind"] == "evaluation" for line in read_lines(metrics))
        self.wants_start = bool(held_out) and config.at_start and not evaluated
        self.wants_end = bool(held_out) and config.at_end

    async def evaluate(self, min_number: int) -> None:
        """Evaluate one version of at least this number."""
        try:
            result = await self._crew.evaluate(self._held_out, min_number)
        except (LaminarError, TimeoutError) as error:
            text = f"evaluation failed: {str(error) or 'it took longer than eval.timeout_seconds'}"
            self._say(text)
            await self._telemetry.emit("notice", fields={"text": text})
            return
        metrics = {
            "eval/accuracy": result.accuracy,
            "eval/num_prompts": len(result.rewards),
            "eval/failed": len(result.failures),
            "eval/version_number": result.version_number,
        }
        count = len(result.rewards)
        self._say(f"held-out accuracy at version {result.version_number}: {result.accuracy:.3f} ({count} prompts)")
        await self._telemetry.emit("evaluation", metrics, fields={"step": result.version_number})

    async def evaluate_start(self) -> None:
        """Evaluate the version that workers start with."""
        await self.evaluate(0)
