"""Removes the stores that dead runs left on this machine; nothing else would ever free their shared memory.

Invariant: a store goes only if nobody holds its owner's or publisher's lock and no relay has touched it for a while, so a
run whose relay is being restarted keeps its versions.
Does not know what is in a store.
"""

import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from relay.locks import FileLock
from relay.store import OWNER, PUBLISHER, REMOVED_PREFIX, STORE_PREFIX, remove_store

ORPHAN_SECONDS = 20.0
"""How long a store must have been untouched; several times what the supervisor needs to restart a relay."""


def remove_orphans(root: Path, *, orphan_seconds: float = ORPHAN_SECONDS) -> list[Path]:
    """Delete this user's stores of dead runs under `root`; returns the folders that went."""
    removed = []
    for folder in root.glob(f"{STORE_PREFIX}*"):
        with ExitStack() as locks:
            if _is_orphan(folder, orphan_seconds, locks):
                remove_store(folder)
                removed.append(folder)
    for leftover in root.glob(f"{REMOVED_PREFIX}{STORE_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return removed


def touch_owner(folder: Path) -> None:
    """Show that the store's relay lives."""
    os.utime(folder / f"{OWNER}.lock")


def _is_orphan(folder: Path, orphan_seconds: float, locks: ExitStack) -> bool:
    """Decide under both locks, which stay held until `locks` closes, so that no owner comes in between."""
    try:
        touched = max((folder / name).stat().st_mtime for name in (f"{OWNER}.lock", "versions"))
        if folder.stat().st_uid != os.geteuid() or time.time() - touched < orphan_seconds:
            return False
        for role in (OWNER, PUBLISHER):
            lock = FileLock.acquire(folder / f"{role}.lock", create=role == PUBLISHER)
            if lock is None:
                return False
            locks.enter_context(lock)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # never owned, being removed, or of another user
        return False
    return True
