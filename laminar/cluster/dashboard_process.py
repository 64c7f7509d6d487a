"""The dashboard beside a run: a process of its own, so that many readers never slow the supervisor.

The port is bound here, so that one that is taken stops the run at its start, by name; the process inherits it, and so does
the one that takes its place when it dies.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

from laminar.config.system import DashboardConfig
from laminar.dashboard.address import bind, url_of

END_SECONDS = 5.0


class DashboardProcess:
    """A started dashboard.

    Args:
        config: `[dashboard]`.
        folder: the run's.
        log: file for its output.

    Attributes:
        url: where it is.

    Raises:
        EnvironmentSetupError: the port is taken.
    """

    def __init__(self, config: DashboardConfig, folder: Path, log: Path) -> None:
        self._config, self._folder, self._log = config, folder, log
        self._listening = bind(config.host, config.port)
        self.url = url_of(self._listening)
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        descriptor = self._listening.fileno()
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "laminar.cli.main", "dashboard", str(self._folder)),
                    *("--host", self._config.host, "--descriptor", str(descriptor)),
                ],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def ensure(self) -> bool:
        """Start it again, on the same port, if it has ended; whether that was needed."""
        if self._process.poll() is None:
            return False
        self._process = self._start()
        return True

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def stop(self) -> None:
        """End it; harmless when it has ended."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
        self._listening.close()
