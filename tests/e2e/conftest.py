"""Whole runs, as a user starts them: the `laminar` command, real Ray, Valkey, DeepSpeed and engines."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.cluster.processes import end_processes, marked_processes
from laminar.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "deploy" / "recipes" / "tiny.toml"


class Run:
    """A `laminar run` (or `resume`) in a process group of its own."""

    def __init__(self, arguments: list[str], directory: Path) -> None:
        self.directory = directory
        self.output = directory / f"output-{time.monotonic_ns()}.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "laminar.cli.main", *arguments],
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def text(self) -> str:
        return self.output.read_text()

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"the run did not end within {seconds} s; it printed:\n{self.text()}") from None

    @property
    def folder(self) -> RunFolder:
        (path,) = [p for p in self.directory.iterdir() if p.is_dir()]
        return RunFolder(path)

    def lines(self, kind: str = "step") -> list[dict]:
        if not any(p.is_dir() for p in self.directory.iterdir()) or not self.folder.metrics.exists():
            return []
        texts = self.folder.metrics.read_text().splitlines()
        return [line for line in map(json.loads, texts) if line["kind"] == kind]

    def wait_for_step(self, step: int, seconds: float = 150.0) -> None:
        self.wait_until(lambda: any(line["step"] >= step for line in self.lines()), f"step {step}", seconds)

    def wait_until(self, condition, name: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the run ended while the test waited for {name}:\n{self.text()}"
            assert time.monotonic() < deadline, f"waited {seconds} s for {name}; the run printed:\n{self.text()}"
            time.sleep(0.05)

    def role_pid(self, role: str) -> int:
        return self.folder.read_state().roles[role]

    def engine_pids(self) -> list[int]:
        pids = marked_processes(self.folder.path.name)
        return [pid for pid in pids if b"rollout.engines.server" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def open_ports(self) -> list[str]:
        """Where processes of the run listen, on other addresses than loopback."""
        return listening([self.process.pid, *marked_processes(self.folder.path.name)])

    def leftovers(self) -> list[str]:
        """Everything of the run that is still there: processes, shared memory, scratch folders."""
        run_id = self.folder.path.name
        token = self.folder.read_state().token
        found = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in marked_processes(run_id)]
        return found + [
            str(p) for p in [*Path("/dev/shm").glob(f"laminar-{run_id}-*"), *Path("/tmp").glob(f"laminar-ray-{token[:8]}")]
        ]

    def wait_until_gone(self, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while left := self.leftovers():
            assert time.monotonic() < deadline, f"still there after {seconds} s: {left}"
            time.sleep(0.1)


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, as the kernel writes them."""


def listening(pids: list[int]) -> list[str]:
    """Listening TCP sockets of these processes that are reached from elsewhere: address, port and command."""
    sockets = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, _, port = local.partition(":")
            if state == "0A" and address not in LOOPBACK:
                sockets[f"socket:[{inode}]"] = f"{address} port {int(port, 16)}"
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            names = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
            found += [f"{sockets[name]}: {command}" for name in names if name in sockets]
    return found


@pytest.fixture
def start(tmp_path):
    """Start a run of the tiny recipe with overrides; whatever is left at the end of the test is ended."""
    runs = []

    def start_run(*overrides: str, resume: Path | None = None, recipe: Path = TINY, directory: Path = tmp_path) -> Run:
        fresh = ["run", str(recipe), f"run.directory={directory}"]
        runs.append(Run([*(["resume", str(resume)] if resume else fresh), *overrides], directory))
        return runs[-1]

    yield start_run
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
        for path in run.directory.iterdir():
            if path.is_dir():
                end_processes(path.name, 10.0)
