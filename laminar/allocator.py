"""Freed memory is kept by the process for its next large buffer, and what never dies is not looked through for garbage.

By default glibc gives every freed block above 128 KiB back to the kernel, and each page of the next one is a fault: on
virtual machines 5 microseconds a page, which for payloads costs several times the copying itself (a trajectory of 16,000
tokens, submitted and fetched: 0.81 ms before, 0.54 ms with this). What is kept so is bounded by `KEPT_BYTES` a process.

Imported libraries are some hundred thousand objects, which every full collection walks through; read trajectories are many
small ones, which make collections frequent (a fifth of the time to read a batch of 200-token trajectories).

A trainer on a CPU needs the same gigabyte of gradients and logits at every step, much of it in blocks above that limit: with
`KEEP_ALL` in its environment it faults no page after the second step (SmolLM2-135M, a small step alone on a machine: a tenth
of the time; beside others more).

This module does not know who calls it.
"""

import ctypes
import gc
import os

KEPT_BYTES = 256 * 1024**2
"""Free memory at the end of the heap that is not given back."""
LARGEST_BLOCK_BYTES = 32 * 1024**2
"""Larger blocks are mapped and given back one by one, as before."""
SERVER_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_MMAP_THRESHOLD_": str(LARGEST_BLOCK_BYTES),
}
"""The same for a program that is not ours; read by glibc when it starts."""
KEEP_ALL = {
    "MALLOC_ARENA_MAX": "1",  # threads share one heap, which is never cut into pieces that are given back one by one
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 * 1024**2),
}
"""For a process that comes to need all its memory again soon: nothing is given back while it lives."""
YOUNG_OBJECTS = 20_000
"""New objects between two looks for cycles; Python's default is 700."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory(kept_bytes: int = KEPT_BYTES) -> bool:
    """Set it for this process, unless its environment says how much it keeps.

    Returns whether its allocator knows of such a thing (glibc's does, musl's does not).

    Args:
        kept_bytes: free memory at the end of the heap that is not given back.
    """
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return True
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(_TRIM_THRESHOLD, kept_bytes) and libc.mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK_BYTES))


def exempt_from_collection() -> None:
    """What is there now is never looked through for garbage again, and new objects less often: call it after the imports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
