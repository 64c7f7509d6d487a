"""The observer: reads every role's events, and writes `metrics.jsonl`, the timeline, and what further sinks want.

It only reads from the run, and lives in a process of its own (`telemetry.observe`): its slowness or death never slows
training. One that is started again reads the stream again, and writes only what has no line yet.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from laminar.json_lines import iterate_lines
from laminar.run_folder import RunFolder
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.follower import POLL_SECONDS, Reader
from laminar.telemetry.sinks.base import Sink
from laminar.telemetry.stream import Event, order_of
from laminar.telemetry.timeline import TimelineFile
from laminar.telemetry.view import RunView
from laminar.trajectories import append_step

logger = logging.getLogger("laminar.observer")

MARKED = ("control", "notice", "alert")
"""Kinds of events that are kept as marks beside the steps, to be shown on plots."""


class Observer:
    """Writes down one life of a run.

    Args:
        reader: of its events.
        file: its `metrics.jsonl`.
        view: kept.
        on_event: told of each event that is news, after it was written.
        folder: for what is drawn; None: nothing is.
        sinks: get every line and every event that is news.
    """

    def __init__(
        self,
        reader: Reader,
        file: MetricsFile,
        view: RunView,
        on_event: Callable[[Event], None],
        folder: RunFolder | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.view = view
        self._reader, self._file, self._on_event, self._sinks = reader, file, on_event, sinks
        self._folder, self._timeline = folder, TimelineFile(folder.timeline) if folder else None
        self._lost_lines = 0
        self._written = file.last_event
        """What is not after this event was written by an earlier observer."""
        self._counted = (0, 0)
        """What is not after this event is in the sums of the last step's line."""
        if (last := _last_step_line(file)) is not None:
            self._counted = order_of(last.get("event", ""))
            view.continue_from(last)

    async def run(self, beat: Callable[[], None]) -> None:
        """Observe until cancelled.

        Consumes: telemetry events. Produces: lines, the view, and a beat after each look. Waits for: new events, by polling.
        """
        while True:
            await self.drain(beat)
            beat()
            await asyncio.sleep(POLL_SECONDS)

    async def drain(self, beat: Callable[[], None] = lambda: None) -> None:
        """Take in all events that are there; a beat after each batch."""
        while events := await self._reader.read():
            for event in events:
                self._take(event)
            beat()

    def _take(self, event: Event) -> None:
        order = order_of(event.event_id)
        if event.event_id and order <= self._counted:
            self.view.catch_up(event)
            return
        if event.kind == "step" and event.metrics["train/step"] <= self._file.last_step:
            return  # told before: a replayed step, or one repeated after Redis lost its tail
        metrics = self.view.apply(event)
        self._draw(event)
        if event.kind == "restored":
            self._file.rewind(int(event.fields["step"]))
            for sink in self._sinks:
                sink.rewind(int(event.fields["step"]))
        elif event.kind == "step":
            self._write(event, self.view.step, {"time": event.time, "batch": event.fields["batch"], **metrics})
        elif event.kind == "evaluation":
            self._write(event, int(event.fields["step"]), {"time": event.time, **event.metrics})
        elif event.kind in MARKED:
            text = f"{event.role}: {event.fields.get('text', '')}"
            self._write(event, self.view.step, {"time": event.time, "what": event.kind, "text": text})
        if not event.event_id or order > self._written:
            for sink in self._sinks:
                sink.add_event(event)
            self._on_event(event)

    def _draw(self, event: Event) -> None:
        """Keep what is drawn, not counted: spans of states, the roles' metrics, which groups a step trained."""
        if self._folder is None or self._timeline is None:
            return
        try:
            if spans := event.fields.get("spans"):
                self._timeline.add_spans(event.role, spans, event.event_id)
                self._timeline.add_roles(event.time, self.view.roles)
            if event.kind == "step" and self._folder.trajectories.is_dir():
                append_step(self._folder.trajectories, self.view.step, event.fields.get("groups", {}))
        except OSError as error:
            logger.warning("timeline or trajectories cannot be written (%s)", error)

    def _write(self, event: Event, step: int, values: dict[str, Any]) -> None:
        """Add a line; a full disk costs lines, never the run."""
        kind = event.kind if event.kind in ("step", "evaluation") else "mark"
        try:
            line = self._file.append(kind, step, values, event.event_id)
        except OSError as error:
            self._lost_lines += 1
            logger.warning("metrics.jsonl cannot be written (%s); %s lines lost so far", error, self._lost_lines)
            return
        if line is not None:
            for sink in self._sinks:
                sink.add_line(line)


async def settle(reader: Reader, file: MetricsFile) -> None:
    """Write what the observer of an earlier life, or one that was killed, did not live to write."""
    await Observer(reader, file, RunView(0), lambda event: None).drain()


def _last_step_line(file: MetricsFile) -> dict[str, Any] | None:
    last = None
    for line in iterate_lines(file.path):
        last = line if line["kind"] == "step" else last
    return last
