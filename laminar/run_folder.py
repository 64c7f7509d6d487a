"""A run's folder: the one place for its config, metrics, checkpoints, logs and state.

    config.toml  metrics.jsonl  timeline.jsonl  trajectories/  checkpoints/  logs/ROLE.log  redis/  state.json  report.html

`state.json` says what `laminar status` needs: run id, process id, status, how to reach Redis. It is readable by its owner
only, since the embedded server's address may hold a password.
"""

import fcntl
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from laminar.errors import ConfigError
from laminar.whole_file import replace_file

FORMAT_VERSION = 1
OWNER_ONLY = 0o600


@dataclass(frozen=True, slots=True)
class RunState:
    """What is known of a run from outside.

    Attributes:
        status: `starting`, `running`, `stopping`, `finished`, `stopped` or `failed`.
        reason: why it stopped or failed, in a sentence.
        lives: how many times it was started or resumed.
        roles: process id of each role that was started and has not ended in order, by name.
        wanted_workers: how many rollout workers are wanted; 0 if that is not known.
        dashboard_url: of the dashboard that `run` serves; empty if it serves none.
    """

    run_id: str
    token: str
    pid: int
    status: str
    reason: str = ""
    redis_url: str = ""
    started_at: float = 0.0
    lives: int = 1
    roles: dict[str, int] = field(default_factory=dict)
    dashboard_url: str = ""
    wanted_workers: int = 0
    format_version: int = FORMAT_VERSION


class RunFolder:
    """Paths and state of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.timeline = path / "timeline.jsonl"
        self.trajectories = path / "trajectories"
        self.report = path / "report.html"
        self.redis = path / "redis"
        self._state = path / "state.json"

    @classmethod
    def create(cls, directory: Path, name: str) -> "RunFolder":
        """Make a new folder `NAME-DATE-TIME-XXXX`."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = cls(directory / f"{name}-{stamp}-{secrets.token_hex(2)}")
        try:
            folder.path.mkdir(parents=True, mode=0o700)  # the config may hold a Redis password
            for path in (folder.checkpoints, folder.logs, folder.redis, folder.trajectories):
                path.mkdir()
        except OSError as error:
            raise ConfigError(
                f"run.directory {str(directory)!r} cannot be written: {error.strerror}; choose another"
            ) from error
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open an existing run's folder.

        Raises:
            ConfigError: if it is not one.
        """
        folder = cls(path)
        if not folder.config.is_file() or not folder._state.is_file():
            raise ConfigError(
                f"{path} is not a run folder (config.toml and state.json are missing); give the path that `run` printed"
            )
        return folder

    def begin_life(self, seconds: float) -> int:
        """Become the one living process of the run.

        The lock goes with the process, and with its sentinel, which inherits it and keeps it until all is cleaned up.

        Args:
            seconds: how long a life that is just ending is waited for.

        Returns:
            The locked file descriptor, to be inherited.

        Raises:
            ConfigError: another life holds the lock.
        """
        descriptor = os.open(self.path / "life.lock", os.O_RDWR | os.O_CREAT, OWNER_ONLY)
        deadline = time.monotonic() + seconds
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigError(f"run {self.path.name} is still alive (or being cleaned up); stop it before resuming")
            time.sleep(0.1)
        return descriptor

    def is_alive(self) -> bool:
        """Whether some process, or its sentinel, holds the run."""
        try:
            descriptor = os.open(self.path / "life.lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not _try_lock(descriptor)
        finally:
            os.close(descriptor)

    def has_state(self) -> bool:
        """Whether a life of the run has begun; before its first, the folder only holds the config."""
        return self._state.is_file()

    def read_state(self) -> RunState:
        """The state last written.

        Raises:
            ConfigError: it is not what this version writes.
        """
        text = self._state.read_text("utf-8", errors="replace")
        try:
            return RunState(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._state} cannot be read ({error}): it was cut short, or written by another version of Laminar. "
                f"Its weights are whole: `laminar export {self.path} DIR`, then start a new run with model.path=DIR"
            ) from error

    def write_state(self, state: RunState) -> RunState:
        """Replace the state in one rename."""
        replace_file(self._state, json.dumps(asdict(state)), mode=OWNER_ONLY, synced=True)
        return state

    def saved_step(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        try:
            return int((self.checkpoints / "latest").read_text("utf-8", errors="replace").strip().removeprefix("step_"))
        except (OSError, ValueError):
            return None

    def write_config(self, text: str) -> None:
        """Replace the settings in one rename: who reads them meanwhile, or after a kill, finds the old ones or the new."""
        replace_file(self.config, text, mode=OWNER_ONLY, synced=True)

    def update_state(self, **changes: object) -> RunState:
        """Change some fields."""
        return self.write_state(replace(self.read_state(), **changes))  # type: ignore[arg-type]


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
