"""Keeping freed memory: the blocks of one size are the same pages again."""

import ctypes
import resource
import subprocess
import sys

import pytest

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
