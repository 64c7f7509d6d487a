"""The observer: reads every role's events, keeps the view, writes `metrics.jsonl`.

It only reads: its slowness or death never slows training. In this version it lives in the supervisor's process.
"""

import asyncio
from collections.abc import Callable

from laminar.telemetry.files import MetricsFile
from laminar.telemetry.stream import Event, TelemetryReader
from laminar.telemetry.view import RunView

POLL_SECONDS = 0.25


class Observer:
    """Follows one run."""

    def __init__(self, reader: TelemetryReader, file: MetricsFile, view: RunView, on_event: Callable[[Event], None]) -> None:
        self.view = view
        self._reader, self._file, self._on_event = reader, file, on_event

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
        if event.kind == "step" and event.metrics["train/step"] <= self._file.last_step:
            self.view.last_progress = event.time  # told before: a replayed step, or one repeated after Redis lost its tail
            return
        metrics = self.view.apply(event)
        if event.kind == "restored":
            self._file.rewind(int(event.fields["step"]))
        elif event.kind == "step":
            self._file.append("step", self.view.step, {"time": event.time, "batch": event.fields["batch"], **metrics})
        elif event.kind == "evaluation":
            self._file.append("evaluation", int(event.fields["step"]), {"time": event.time, **event.metrics})
        self._on_event(event)
