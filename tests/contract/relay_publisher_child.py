"""Publishes in forked children that are killed; run by test_relay_kill.py.

Commands on standard input, one a line, answered by one line each:
    step NUMBER EVENT   fork a child that publishes 0.NUMBER and kills itself at its EVENT-th step; answers its exit status
    loop NUMBER         fork a child that publishes 0.NUMBER, 0.NUMBER+1 ... until killed; answers its pid
    reap                wait for the looping child, which the test has killed; answers its exit status
"""

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from laminar.types import WeightVersion
from relay.publisher import Publisher
from relay.store import VersionStore

torch.set_num_threads(1)
STEPS = ("open", "os.", "shutil.", "fcntl.", "mmap.", "relay_test.")


def tensors(number: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every number of version 0.n is n."""
    for index in range(5):
        sys.audit("relay_test.tensor")
        yield f"t{index}", torch.full((30_000 + index,), float(number))


def publish(root: Path, model_files: Path, numbers: Iterator[int]) -> None:
    publisher = Publisher(VersionStore(root, "kill", "node"), model_files, chunk_bytes=50_000)
    for number in numbers:
        publisher.publish(WeightVersion(0, number), tensors(number))


def die_at(event_number: int) -> None:
    counter = itertools.count(1)

    def on_event(event: str, arguments: object) -> None:
        if event.startswith(STEPS) and next(counter) == event_number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)


def main() -> None:
    root, model_files = map(Path, sys.argv[1:])
    child = 0
    for line in sys.stdin:
        command, *numbers = line.split()
        if command != "reap":
            child = os.fork()
        if child == 0:
            if command == "step":
                die_at(int(numbers[1]))
                publish(root, model_files, iter([int(numbers[0])]))
            else:
                publish(root, model_files, itertools.count(int(numbers[0])))
            os._exit(0)
        print(child if command == "loop" else os.waitpid(child, 0)[1], flush=True)
    os._exit(0)  # torch takes a second to leave in order


main()
