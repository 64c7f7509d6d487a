"""The observer as a process: it writes what it is told, is started again when it dies or hangs, and ends in order."""

import asyncio
import contextlib
import os
import signal
from collections import Counter

import pytest

from laminar.cluster.observer_process import ObserverProcess, pause_seconds
from laminar.config.load import dump_toml
from laminar.config.root import LaminarConfig
from laminar.json_lines import read_lines
from laminar.run_folder import RunFolder, RunState
from laminar.telemetry.stream import TelemetryReader, TelemetryWriter, order_of


@pytest.fixture
async def kept(valkey, redis_client, run_id, tmp_path):
    """A kept observer of a run whose trainer is the test."""
    folder = RunFolder.create(tmp_path, "a")
    folder.config.write_text(dump_toml(LaminarConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}})))
    folder.write_state(RunState(run_id, "token", os.getpid(), "running", redis_url=valkey.url))
    telemetry = TelemetryWriter(redis_client, run_id, "trainer-0")
    pids, restarts = [], Counter()
    observer = ObserverProcess(
        folder.path,
        folder.logs / "observer.log",
        restarts,
        lambda role, pid: pids.append(pid),
        telemetry,
        silent_seconds=2.0,
    )
    task = asyncio.create_task(observer.run())

    async def step(number):
        metrics = {"train/step": number, "train/tokens": 1.0, "time/step_seconds": 1.0}
        await telemetry.emit("step", metrics, fields={"train_started": 0.0, "train_ended": 1.0, "batch": "b"})

    async def wait_for(condition, seconds=60):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.02)

    def steps():
        lines = read_lines(folder.metrics)
        return [line["step"] for line in lines if line["kind"] == "step"]

    async def end():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return await observer.end()

    yield folder, pids, restarts, step, steps, wait_for, end
    await end()


async def test_ids_of_a_new_life_come_after_those_of_the_last_whatever_the_clock_says(redis_client, run_id):
    reader, telemetry = TelemetryReader(redis_client, run_id), TelemetryWriter(redis_client, run_id, "trainer-0")
    await telemetry.emit("notice", fields={"text": "of the last life"})
    await reader.begin(after=(10**15, 7))  # some thirty thousand years ahead
    await telemetry.emit("notice", fields={"text": "of this life"})
    events = await reader.read()
    assert [(event.kind, order_of(event.event_id) > (10**15, 7)) for event in events] == [("begin", True), ("notice", True)]


async def test_an_observer_writes_to_the_last_event_and_ends_in_order(kept):
    folder, _, _, step, steps, wait_for, end = kept
    await step(1)
    await wait_for(lambda: steps() == [1])
    await step(2)
    assert await end(), (folder.logs / "observer.log").read_text()
    assert steps() == [1, 2]
    assert (folder.path / "trace.json").exists()


def test_the_pause_before_a_start_doubles_up_to_a_minute_however_often_it_was_started():
    assert [pause_seconds(count) for count in (1, 2, 9, 10, 2000)] == [0.2, 0.4, 51.2, 60.0, 60.0]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "why"), [(signal.SIGKILL, "ended with status -9"), (signal.SIGSTOP, "silent for 2 s")])
async def test_an_observer_that_dies_or_hangs_is_started_again_and_loses_no_line(kept, how, why):
    folder, pids, restarts, step, steps, wait_for, end = kept
    await step(1)
    await wait_for(lambda: steps() == [1])
    os.kill(pids[0], how)
    await step(2)
    await wait_for(lambda: steps() == [1, 2])
    assert (len(pids), restarts["observer"]) == (2, 1)
    await step(3)
    assert await end()
    assert steps() == [1, 2, 3]
    marks = [line["text"] for line in read_lines(folder.metrics) if line["kind"] == "mark"]
    assert [why in text for text in marks] == [True]


@pytest.mark.slow
async def test_an_observer_that_hangs_at_the_end_is_killed_and_said_to_have_failed(kept, monkeypatch):
    _, pids, _, step, steps, wait_for, end = kept
    monkeypatch.setattr("laminar.cluster.observer_process.END_SECONDS", 0.5)
    await step(1)
    await wait_for(lambda: steps() == [1])
    os.kill(pids[0], signal.SIGSTOP)
    assert not await end()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
