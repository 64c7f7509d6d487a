"""Simulated machines on this one: a network namespace each, joined by a bridge, every network card limited to one rate.

Needs Linux, root, and `ip` and `tc`. A process enters its machine's namespace; Unix sockets and files stay shared.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
CARD = "eth0"
BURST = "256kb"


class Machines:
    """So many machines; number 0 is the trainer's.

    Args:
        count: how many.
        bytes_per_second: of each card, in each direction.
    """

    def __init__(self, count: int, bytes_per_second: float) -> None:
        self._name = f"lam{os.getpid()}"
        self._network = f"10.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250}"
        self._rate = f"{int(bytes_per_second * 8 / 1000)}kbit"
        self.count = count

    def host(self, index: int) -> str:
        """A machine's address."""
        return f"{self._network}.{index + 1}"

    def enter(self, index: int) -> None:
        """Move this thread, and what it starts from now on, onto a machine."""
        _enter(Path("/var/run/netns") / f"{self._name}-{index}")

    def build(self) -> None:
        """Make them.

        Raises:
            subprocess.CalledProcessError, OSError: this machine does not let us.
        """
        _run("ip", "link", "add", self._name, "type", "bridge")
        _run("ip", "link", "set", self._name, "up")
        for index in range(self.count):
            space, cable = f"{self._name}-{index}", f"{self._name}{index}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", cable, "type", "veth", "peer", "name", CARD, "netns", space)
            _run("ip", "link", "set", cable, "master", self._name, "up")
            inside = ("ip", "netns", "exec", space)
            _run(*inside, "ip", "address", "add", f"{self.host(index)}/24", "dev", CARD)
            for device in (CARD, "lo"):
                _run(*inside, "ip", "link", "set", device, "up")
            shape = ("root", "tbf", "rate", self._rate, "burst", BURST, "latency", "200ms")
            _run("tc", "qdisc", "add", "dev", cable, *shape)  # what it receives
            _run(*inside, "tc", "qdisc", "add", "dev", CARD, *shape)  # what it sends

    def set_cable(self, index: int, *, plugged: bool) -> None:
        """Cut a machine off, without a word to anybody, or connect it again."""
        _run("ip", "link", "set", f"{self._name}{index}", "up" if plugged else "down")

    def remove(self) -> None:
        """Take them away; harmless when there are none."""
        for index in range(self.count):
            subprocess.run(["ip", "netns", "del", f"{self._name}-{index}"], capture_output=True)
        subprocess.run(["ip", "link", "del", self._name], capture_output=True)


@contextmanager
def simulated_machines(count: int, bytes_per_second: float) -> Iterator[Machines]:
    """Machines, until the end; this thread stays where it is."""
    machines = Machines(count, bytes_per_second)
    try:
        machines.build()
        yield machines
    finally:
        machines.remove()


@contextmanager
def on_machine(machines: Machines, index: int) -> Iterator[None]:
    """This thread, and what it starts meanwhile, on a machine."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        machines.enter(index)
        yield
    finally:
        _set_namespace(home)
        os.close(home)


def _enter(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _set_namespace(descriptor)
    finally:
        os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network namespace cannot be entered")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
