"""Keeping freed memory: the blocks of one size are the same pages again."""

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from laminar.allocator import KEEP_ALL

FAULTS = """
import resource
from laminar.allocator import keep_freed_memory
if {keeps}:
    assert keep_freed_memory()
bytes(4_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    bytes(b"x" * 100_000) + bytes(4_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keeps):
    done = subprocess.run([sys.executable, "-c", FAULTS.format(keeps=keeps)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another allocator than glibc's")
def test_a_block_as_large_as_the_last_one_is_not_faulted_in_anew():
    pages = 50 * 2 * 4_000_000 // resource.getpagesize()
    assert faults(keeps=True) < pages / 10


CYCLE = """
import gc, weakref
from laminar.allocator import exempt_from_collection
class Node: pass
old = Node()
exempt_from_collection()
is_exempt = all(thing is not old for thing in gc.get_objects())
cycle = Node()
cycle.itself, seen = cycle, weakref.ref(cycle)
del cycle
alive = [[] for _ in range(100_000)]
print(is_exempt, seen() is None)
"""


def test_what_was_there_is_exempt_and_a_new_cycle_is_still_found():
    done = subprocess.run([sys.executable, "-c", CYCLE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


ALL = """
import resource
from laminar.allocator import keep_freed_memory
assert keep_freed_memory()
usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytes(100_000_000)
before = usage()
for _ in range(5):
    bytes(b"x" * 50_000_000) + bytes(50_000_000)
print(usage() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another allocator than glibc's")
def test_a_trainer_keeps_blocks_of_any_size():
    """The largest live at once, 200 MB, are faulted in once, not five times."""
    command = [sys.executable, "-c", ALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **KEEP_ALL})
    assert int(done.stdout) < 2 * 200_000_000 / resource.getpagesize()
