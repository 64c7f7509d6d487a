"""The observer: reads every role's events, keeps the view, writes `metrics.jsonl`.

It only reads: its slowness or death never slows training. In this version it lives in the supervisor's process.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from laminar.run_folder import RunFolder
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.stream import Event, TelemetryReader
from laminar.telemetry.timeline import TimelineFile
from laminar.telemetry.view import RunView
from laminar.trajectories import append_step

logger = logging.getLogger("laminar.observer")

POLL_SECONDS = 0.25
MARKED = ("control", "notice")
"""Kinds of events that are kept as marks beside the steps, to be shown on plots."""


class Observer:
    """Follows one life of a run.

    Attributes:
        view: what is known.
        last_progress: when (`time.monotonic`) a step was last heard of.
    """

    def __init__(
        self,
        reader: TelemetryReader,
        file: MetricsFile,
        view: RunView,
        on_event: Callable[[Event], None],
        folder: RunFolder | None = None,
    ) -> None:
        self.view = view
        self.last_progress = time.monotonic()
        self._reader, self._file, self._on_event = reader, file, on_event
        self._folder, self._timeline = folder, TimelineFile(folder.timeline) if folder else None
        self._lost_lines = 0

    async def settle_last_life(self) -> None:
        """Write steps of an earlier life that its observer did not live to write; then begin with an empty stream."""
        while events := await self._reader.read():
            for event in events:
                if event.kind == "step":
                    step = int(event.metrics["train/step"])
                    self._write("step", step, {"time": event.time, "batch": event.fields["batch"], **event.metrics})
        await self._reader.forget()

    async def run(self) -> None:
        """Follow the run until cancelled.

        Consumes: telemetry events. Produces: lines of `metrics.jsonl`, the view. Waits for: new events, by polling.
        """
        while True:
            await self.drain()
            await asyncio.sleep(POLL_SECONDS)

    async def drain(self) -> None:
        """Take in all events that are there."""
        while events := await self._reader.read():
            for event in events:
                self._take(event)

    def _take(self, event: Event) -> None:
        if event.kind == "step":
            self.last_progress = time.monotonic()
            if event.metrics["train/step"] <= self._file.last_step:
                return  # told before: a replayed step, or one repeated after Redis lost its tail
        metrics = self.view.apply(event)
        self._draw(event)
        if event.kind == "restored":
            self._file.rewind(int(event.fields["step"]))
        elif event.kind == "step":
            self._write("step", self.view.step, {"time": event.time, "batch": event.fields["batch"], **metrics})
        elif event.kind == "evaluation":
            self._write("evaluation", int(event.fields["step"]), {"time": event.time, **event.metrics})
        elif event.kind in MARKED:
            mark = {"time": event.time, "what": event.kind, "text": f"{event.role}: {event.fields.get('text', '')}"}
            self._write("mark", self.view.step, mark)
        self._on_event(event)

    def _draw(self, event: Event) -> None:
        """Keep what is drawn, not counted: spans of states, the roles' metrics, which groups a step trained."""
        if self._folder is None or self._timeline is None:
            return
        try:
            if spans := event.fields.get("spans"):
                self._timeline.add_spans(event.role, spans)
                self._timeline.add_roles(event.time, self.view.roles)
            if event.kind == "step" and self._folder.trajectories.is_dir():
                append_step(self._folder.trajectories, self.view.step, event.fields.get("groups", ()))
        except OSError as error:
            logger.warning("timeline or trajectories cannot be written (%s)", error)

    def _write(self, kind: str, step: int, values: dict[str, object]) -> None:
        """Add a line; a full disk costs lines, never the run."""
        try:
            self._file.append(kind, step, values)
        except OSError as error:
            self._lost_lines += 1
            logger.warning("metrics.jsonl cannot be written (%s); %s lines lost so far", error, self._lost_lines)
