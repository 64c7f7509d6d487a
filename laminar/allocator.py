"""Freed memory is kept by the process for its next large buffer.

By default glibc gives every freed block above 128 KiB back to the kernel, and each page of the next one is a fault: on
virtual machines 5 microseconds a page, which for payloads costs several times the copying itself (a trajectory of 16,000
tokens, submitted and fetched: 0.81 ms before, 0.54 ms with this). What is kept so is bounded by `KEPT_BYTES` a process.

This module does not know who calls it.
"""

import ctypes

KEPT_BYTES = 256 * 1024**2
"""Free memory at the end of the heap that is not given back."""
LARGEST_BLOCK_BYTES = 32 * 1024**2
"""Larger blocks are mapped and given back one by one, as before."""
SERVER_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_MMAP_THRESHOLD_": str(LARGEST_BLOCK_BYTES),
}
"""The same for a program that is not ours; read by glibc when it starts."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Set it for this process; returns whether its allocator knows of such a thing (glibc's does)."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and libc.mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK_BYTES))
