"""No process outlives its run: the mark finds a whole tree, the sentinel ends it when its supervisor dies."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid

import pytest

from laminar.cluster.processes import end_processes, marked_processes, resident_bytes
from laminar.cluster.roles import RUN_ID_VARIABLE
from laminar.cluster.supervisor import Supervisor
from laminar.cluster.usage import UsageMeter, held_bytes, look_at
from laminar.config.root import LaminarConfig
from laminar.run_folder import RunFolder

TREE = """import subprocess, sys, time
subprocess.Popen([sys.executable, '-c', 'import time; print(flush=True); time.sleep(60)'], start_new_session=True)
time.sleep(60)"""


def start_tree(run_id):
    """A process and its child; both have loaded what they load when it returns, so that their memory stands still."""
    process = subprocess.Popen(
        [sys.executable, "-c", TREE], env={**os.environ, RUN_ID_VARIABLE: run_id}, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    return process


async def test_the_first_signal_ends_a_run_that_is_still_reading_its_data(tmp_path, monkeypatch):
    loop, release = asyncio.get_running_loop(), threading.Event()
    reads_in_daemon_thread = loop.create_future()

    def read(config, config_folder):
        loop.call_soon_threadsafe(reads_in_daemon_thread.set_result, threading.current_thread().daemon)
        release.wait(60)

    monkeypatch.setattr("laminar.cluster.supervisor.load_run_data", read)
    monkeypatch.setenv(RUN_ID_VARIABLE, "")
    (tmp_path / "model").mkdir()
    config = LaminarConfig.model_validate({"model": {"path": str(tmp_path / "model")}, "data": {"path": "d"}})
    folder = RunFolder.create(tmp_path, "a")
    said = []
    supervisor = Supervisor(config, folder, tmp_path, folder.begin_life(1), lambda event, view: None, said.append)
    run = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(60):
        assert await reads_in_daemon_thread  # the process's end does not wait for it either
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait({run})
    release.set()
    assert run.cancelled()
    assert said == ["SIGINT: ending, for no step has begun"]
    state = folder.read_state()
    assert (state.status, state.reason) == ("stopped", "told to stop while it was starting")


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_the_mark_finds_grandchildren_in_sessions_of_their_own_and_ends_them():
    run_id = uuid.uuid4().hex
    process = start_tree(run_id)
    wait_for(lambda: len(marked_processes(run_id)) == 2)
    assert resident_bytes(marked_processes(run_id)) > 1_000_000
    assert end_processes(run_id, 10.0) == []
    assert process.wait(5) == -signal.SIGKILL
    assert marked_processes(run_id) == []


def test_memory_is_told_by_kind_of_role_with_all_that_a_role_started(tmp_path):
    run_id = uuid.uuid4().hex
    process = start_tree(run_id)
    try:
        wait_for(lambda: len(marked_processes(run_id)) == 2)
        both = resident_bytes(marked_processes(run_id))
        told = UsageMeter(run_id, tmp_path).measure({"rollout-0": process.pid, "rollout-1": 2**22 + 1})
        assert told["system/memory_bytes_rollout"] == pytest.approx(both, rel=0.2)
        assert told["system/memory_bytes_supervisor"] == pytest.approx(resident_bytes([os.getpid()]), rel=0.2)
        assert "system/memory_bytes_other" not in told
        assert UsageMeter(run_id, tmp_path).measure({})["system/memory_bytes_other"] == pytest.approx(both, rel=0.2)
    finally:
        end_processes(run_id, 10.0)
        process.wait(5)


def test_use_is_that_of_the_runs_processes_and_of_its_own_shared_memory(tmp_path):
    run_id = uuid.uuid4().hex
    for name, size in ((f"laminar-{run_id}-node", 40_960), ("laminar-other-node", 81_920)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "slot").write_bytes(b"1" * size)
    meter = UsageMeter(run_id, tmp_path)
    first = meter.measure({})
    assert first["system/cpu_ratio"] == 0
    assert 40_960 <= first["system/shared_memory_bytes"] < 81_920  # the folder may take a block of its own
    before = look_at([os.getpid()])[os.getpid()].processor_seconds
    while look_at([os.getpid()])[os.getpid()].processor_seconds < before + 0.02:
        sum(range(100_000))
    second = meter.measure({})
    assert second["system/cpu_ratio"] > 0
    assert second["system/host_memory_bytes"] > 1_000_000
    assert held_bytes([tmp_path / "gone"]) == 0
    assert look_at([2**22 + 1]) == {}


def test_a_version_that_is_a_link_to_its_slot_takes_no_room_of_its_own(tmp_path):
    (tmp_path / "slot").write_bytes(b"1" * 40_960)
    alone = held_bytes([tmp_path])
    os.link(tmp_path / "slot", tmp_path / "version")
    assert held_bytes([tmp_path]) < alone + 40_960


def test_folders_that_come_and_go_while_they_are_measured_are_no_error(tmp_path):
    """As the store's versions do; each round of the one is many of the other."""
    ending = threading.Event()

    def churn():
        while not ending.is_set():
            (tmp_path / "versions" / "0.1" / "inner").mkdir(parents=True)
            shutil.rmtree(tmp_path / "versions")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert all(held_bytes([tmp_path]) >= 0 for _ in range(2000))
    finally:
        ending.set()
        thread.join()


def test_another_runs_processes_are_left_alone():
    mine, other = uuid.uuid4().hex, uuid.uuid4().hex
    process = start_tree(other)
    wait_for(lambda: len(marked_processes(other)) == 2)
    end_processes(mine, 1.0)
    assert process.poll() is None
    end_processes(other, 10.0)
    process.wait(5)


def test_the_sentinel_ends_everything_and_removes_folders_when_its_supervisor_is_killed(tmp_path):
    run_id = uuid.uuid4().hex
    (tmp_path / f"laminar-{run_id}-node").mkdir()
    supervisor = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            "from laminar.cluster.sentinel import Sentinel\n"
            f"Sentinel({run_id!r}, [{str(tmp_path)!r} + '/laminar-{run_id}-*'])\n"
            f"os.environ[{RUN_ID_VARIABLE!r}] = {run_id!r}\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
            "time.sleep(60)",
        ]
    )
    wait_for(lambda: len(marked_processes(run_id)) == 1)
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not marked_processes(run_id) and not list(tmp_path.iterdir()))


def test_a_process_whose_name_is_cut_in_the_middle_of_a_letter_is_measured(tmp_path):
    """The kernel keeps 15 bytes of a name."""
    script = tmp_path / "aufgabenxxxxxxé.sh"
    script.write_text("#!/bin/sh\necho\nsleep 60\n")
    script.chmod(0o755)
    process = subprocess.Popen([str(script)], stdout=subprocess.PIPE, start_new_session=True)
    try:
        process.stdout.readline()
        assert look_at([process.pid])[process.pid].parent == os.getpid()
        assert resident_bytes([process.pid]) > 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)
