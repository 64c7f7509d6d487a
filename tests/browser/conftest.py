"""A real tiny run with its dashboard, and a page of Debian's Chromium on it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from laminar.cluster.processes import end_processes
from laminar.json_lines import read_lines
from laminar.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]


class LiveRun:
    """A run that goes on until the tests have ended."""

    def __init__(self, directory):
        self.output = directory / "output.txt"
        arguments = [
            "run", str(ROOT / "deploy/recipes/tiny.toml"), f"run.directory={directory / 'runs'}",
            "run.max_steps=100000",
            "rollout.num_workers=2", "dashboard.enabled=true", "dashboard.port=0", "metrics.trajectory_rate=1.0",
            "eval.path=",
            "staleness.max_staleness=2", "trainer.algorithm.options.filter_zero_variance=false",
            "trainer.learning_rate=3e-4",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "laminar.cli.main", *arguments],
            stdout=self.output.open("w"), stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.folder = self._wait(lambda: next(iter((directory / "runs").glob("tiny-*")), None), "the run folder")
        self.folder = RunFolder(self.folder)
        self.url = self._wait(lambda: self.folder.read_state().dashboard_url, "the dashboard")
        self.wait_for_step(5)

    def _wait(self, condition, name, seconds=300.0):
        deadline = time.monotonic() + seconds
        while True:
            try:
                if found := condition():
                    return found
            except FileNotFoundError:
                pass
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, f"waited {seconds} s for {name}:\n{self.output.read_text()}"
            time.sleep(0.1)

    def wait_for_step(self, step):
        """Until so many steps have ended."""
        self._wait(lambda: sum(line["kind"] == "step" for line in read_lines(self.folder.metrics)) >= step, f"step {step}")

    def kill_role(self, role):
        os.kill(self.folder.read_state().roles[role], signal.SIGKILL)

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        end_processes(self.folder.path.name, 20.0)


@pytest.fixture(scope="session")
def live(tmp_path_factory):
    run = LiveRun(tmp_path_factory.mktemp("browser"))
    yield run
    run.end()


@pytest.fixture(scope="session")
def browser():
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser, live):
    """A page that notes every console error and every request to another host; there must be none."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    opened = context.new_page()
    opened.set_default_timeout(30_000)
    troubles = []
    opened.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("request", lambda request: troubles.append(request.url) if not request.url.startswith(live.url) else None)
    yield opened
    context.close()
    assert troubles == []
