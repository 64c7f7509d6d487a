"""Guards one server process: it lives exactly as long as the process that started this one.

Run by file path in a bare interpreter (`python -I -S lifeline.py ...`), so it imports the standard library only. Standard
input is the lifeline: when its other end closes, by an orderly stop or by the starter's death, however violent, the server
gets SIGTERM and, after the deadline, SIGKILL. On Linux the server also dies when this guard is killed.

An exclusive lock on `LOCK`, which the server inherits, keeps a second server off the same data while the first still writes.
Arguments: LOCK STOP_SECONDS COMMAND...
"""

import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.5
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Start the server, wait for its end or for the lifeline's, and stop it."""
    lock_path, stop_seconds, command = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    starter = os.getppid()
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the starter decides, through the lifeline
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    if not lock_within(lock, stop_seconds):
        print(f"another server still uses {lock_path}", file=sys.stderr)
        return 75
    # The guard has one thread, which outlives the server, so a child hook and a parent-death signal are safe here.
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=(lock,), preexec_fn=restore_signals_and_die_with_guard
    )
    ends = [sys.stdin.fileno(), *([os.pidfd_open(server.pid)] if sys.platform == "linux" else [])]
    while server.poll() is None and starter_lives(starter, ends):
        pass
    stop(server, stop_seconds)
    return server.returncode


def lock_within(lock: int, seconds: float) -> bool:
    """Whether the lock was had in time; a predecessor that is shutting down holds it for a moment."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def restore_signals_and_die_with_guard() -> None:
    """Child side: default signals; the kernel's parent-death signal on Linux."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def starter_lives(starter: int, ends: list[int]) -> bool:
    """Wait a moment, or for one of two ends: the lifeline's (first) and the server's.

    False once the lifeline is closed or the starter is gone (a forked copy of it may hold the pipe open).
    """
    ready, _, _ = select.select(ends, [], [], POLL_SECONDS)
    if ends[0] in ready and not os.read(ends[0], 4096):
        return False
    return os.getppid() == starter


def stop(server: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Terminate, wait, kill."""
    if server.poll() is None:
        server.terminate()
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
