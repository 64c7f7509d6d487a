"""A detached run outlives its terminal, its shell and their session, and is stopped from outside."""

import contextlib
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.cluster.processes import end_processes, marked_processes
from laminar.json_lines import read_lines
from laminar.run_folder import RunFolder

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
LAMINAR = [sys.executable, "-m", "laminar.cli.main"]
EMULATED = (
    "trainer.kind=emulated",
    "trainer.emulated.step_seconds=[0.2]",
    "rollout.engine.kind=emulated",
    "rollout.engine.options.length-scale=0.005",
    "rollout.engine.options.time-factor=4.0",
    "run.max_steps=100000",
    "eval.path=",
)


class Terminal:
    """A shell that leads a session of its own, with a terminal of its own, and stays after its command."""

    def __init__(self, command):
        self.master, slave = pty.openpty()
        name = os.ttyname(slave)
        script = f"exec <{name} >{name} 2>&1; {shlex.join(command)}; sleep 1000"  # a leader that opens a terminal owns it
        self.shell = subprocess.Popen(["bash", "-c", script], start_new_session=True, cwd=ROOT)
        self._slave, self._text = slave, ""

    def read_until(self, pattern, seconds=90):
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self._text)):
            assert time.monotonic() < deadline, self._text
            if select.select([self.master], [], [], 0.1)[0]:
                self._text += os.read(self.master, 4096).decode(errors="replace")
        return found

    def destroy(self):
        """Take the terminal away, which hangs up, and kill whatever of the session is left."""
        os.close(self._slave)
        os.close(self.master)
        for entry in os.listdir("/proc"):
            with contextlib.suppress(ProcessLookupError):
                if entry.isdecimal() and os.getsid(int(entry)) == self.shell.pid:
                    os.kill(int(entry), signal.SIGKILL)
        self.shell.wait(10)


@pytest.fixture
def terminal(tmp_path):
    opened = Terminal([*LAMINAR, "run", "--detach", "deploy/recipes/tiny.toml", f"run.directory={tmp_path}", *EMULATED])
    yield opened
    with contextlib.suppress(ProcessLookupError):
        os.killpg(opened.shell.pid, signal.SIGKILL)
    for path in tmp_path.iterdir():
        end_processes(path.name, 10)


def last_step(folder):
    lines = read_lines(folder.metrics)
    return max((line["step"] for line in lines if line["kind"] == "step"), default=0)


def wait_for_step(folder, step, seconds=120):
    deadline = time.monotonic() + seconds
    while last_step(folder) < step:
        assert folder.is_alive(), (folder.logs / "supervisor.log").read_text()
        assert time.monotonic() < deadline, f"waited {seconds} s for step {step}"
        time.sleep(0.05)


def test_a_detached_run_goes_on_without_its_terminal_until_it_is_told_to_stop(terminal, tmp_path):
    pid = int(terminal.read_until(r"goes on by itself as process (\d+)")[1])
    (path,) = tmp_path.iterdir()
    folder = RunFolder(path)
    terminal.read_until(re.escape(f"laminar stop {path}"))
    wait_for_step(folder, 2, seconds=300)
    terminal.destroy()
    seen = last_step(folder)
    wait_for_step(folder, seen + 5)
    assert os.getsid(pid) == pid
    assert "step" in subprocess.run([*LAMINAR, "logs", str(path), "supervisor"], capture_output=True, text=True).stdout
    stopped = subprocess.run([*LAMINAR, "stop", str(path)], capture_output=True, text=True, timeout=90)
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped: told to stop" in stopped.stdout
    assert marked_processes(path.name) == []
    assert not folder.is_alive()
