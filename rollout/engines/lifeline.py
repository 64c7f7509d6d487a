"""A child process that does not outlive its parent.

Two ropes, for each has a gap: the kernel's parent-death signal (set after the fork, so a parent may have died already) and
a pipe on standard input that ends with the parent (a parent that hangs but lives keeps it open). The signal comes already
when the *thread* that started us ends, so start engines from a thread that stays. This module knows nothing of engines.
"""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process at once when its parent ends, or closes our standard input."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_input, name="lifeline", daemon=True).start()


def _watch_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # the group is ours: everything that we started goes too
    os._exit(0)
