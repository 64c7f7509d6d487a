"""The dashboard beside a run: a process of its own, so that many readers never slow the supervisor.

The port is bound here, so that one that is taken stops the run at its start, by name; the process inherits it.
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
        with bind(config.host, config.port) as listening, log.open("ab") as output:
            self.url = url_of(listening)
            descriptor = listening.fileno()
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "laminar.cli.main", "dashboard", str(folder)),
                    *("--host", config.host, "--descriptor", str(descriptor)),
                ],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

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
