"""The observer's process: `python -m laminar.telemetry.observe RUN`, started and watched by the supervisor.

It ends in order when its standard input closes: what the stream still holds is written first. It says that it lives by one
byte on its standard output after each look at the stream; its words go to standard error.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from laminar.config.load import load_config, read_toml
from laminar.config.redact import redact
from laminar.config.root import LaminarConfig
from laminar.dashboard.alerts import Alert, find_alerts
from laminar.experience.client import connect
from laminar.run_folder import RunFolder
from laminar.telemetry.alert_watch import AlertWatch, Hearing
from laminar.telemetry.delivery import Deliveries
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.observer import Observer
from laminar.telemetry.sinks.base import Line, Sink, ThreadedSink, Writer
from laminar.telemetry.sinks.trace import TraceSink
from laminar.telemetry.stream import Event, TelemetryReader
from laminar.telemetry.view import RunView

logger = logging.getLogger("laminar.observer")

JUDGE_SECONDS = 2.0


class AlertSink:
    """Lets an observer's lines and events be judged."""

    def __init__(self, config: LaminarConfig, folder: RunFolder, deliveries: Deliveries) -> None:
        self._folder, self._deliveries = folder, deliveries
        self._hearing, self._watch = Hearing(config.trainer.mismatch_alarm), AlertWatch(config.alerts.repeat_seconds)

    def add_line(self, line: Line) -> None:
        """A step's metrics."""
        self._hearing.note_line(line)

    def add_event(self, event: Event) -> None:
        """What roles say; an alert that one of them raises goes out at once."""
        self._hearing.note(event, time.time())
        if event.kind == "alert":
            self._deliveries.post(Alert("critical", str(event.fields["name"]), str(event.fields["text"])))

    def rewind(self, step: int) -> None:
        """Alerts are about now."""

    def close(self) -> None:
        """Nothing is kept."""

    async def run(self) -> None:
        """Judge until cancelled.

        Consumes: what was heard. Produces: deliveries. Waits for: the next look.
        """
        while True:
            usage, now = shutil.disk_usage(self._folder.path), time.time()
            facts = self._hearing.facts(now, usage.free / usage.total, is_alive=True)
            for alert in self._watch.news(find_alerts(facts), now):
                self._deliveries.post(alert)
            await asyncio.sleep(JUDGE_SECONDS)


async def observe(folder: RunFolder) -> None:
    """Observe one life of a run until standard input closes."""
    state, config = folder.read_state(), load_config(folder.config)
    client = await connect(state.redis_url)
    deliveries = Deliveries(config.alerts, state.run_id)
    alerts = AlertSink(config, folder, deliveries)
    sinks = [*open_sinks(config, folder, state.run_id), alerts]
    view = RunView(config.run.max_steps, config.trainer.num_ranks, config.rollout.engine.tensor_parallel_size)
    reader, metrics = TelemetryReader(client, state.run_id), MetricsFile(folder.metrics)
    observer = Observer(reader, metrics, view, lambda event: None, folder, sinks)
    loops = [observer.run(beat), alerts.run(), deliveries.run()]
    tasks = [asyncio.create_task(loop) for loop in loops]
    ending = asyncio.create_task(_input_closes())
    await asyncio.wait([*tasks, ending], return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        for task in tasks:
            if task.done():
                task.result()  # raises why
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.wait(tasks[:2])
    await observer.drain()
    for sink in sinks:
        sink.close()
    await deliveries.finish(config.alerts.timeout_seconds)
    tasks[2].cancel()
    await client.aclose()


def open_sinks(config: LaminarConfig, folder: RunFolder, run_id: str) -> list[Sink]:
    """The sinks that `[metrics]` asks for; what one does not need is not imported."""
    metrics = config.metrics
    sinks: list[Sink] = []
    if metrics.trace:
        sinks.append(TraceSink(folder.path / "trace.json", metrics.max_trace_bytes // 2))
    if metrics.tensorboard:

        def open_tensorboard() -> Writer:
            from laminar.telemetry.sinks.tensorboard import TensorBoardWriter

            return TensorBoardWriter(folder.path / "tensorboard")

        (folder.path / "tensorboard").mkdir(exist_ok=True)
        sinks.append(_threaded("tensorboard", open_tensorboard, folder))
    mode = metrics.wandb
    if mode != "off":

        def open_wandb() -> Writer:
            from laminar.telemetry.sinks.weights_and_biases import WandbWriter

            settings = redact(read_toml(folder.config))
            return WandbWriter(folder.path, run_id, mode, metrics.wandb_project, settings)

        sinks.append(_threaded("wandb", open_wandb, folder))
    return sinks


def _threaded(name: str, open_writer: Callable[[], Writer], folder: RunFolder) -> ThreadedSink:
    return ThreadedSink(name, open_writer, folder.metrics, folder.path / f".{name}-position")


def beat() -> None:
    """Tell the supervisor that we live; one that does not listen is no reason to stop."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), b".")


async def _input_closes() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    folder = RunFolder.open(parser.parse_args().run)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the supervisor ends us, last
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(observe(folder))


if __name__ == "__main__":
    main()
