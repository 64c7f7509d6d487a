"""How fast do weights reach other machines? `python -m benchmarks.relay_network [--quick]`. Needs root (network namespaces).

64 MB to four machines, every network card limited to 100 MB/s each way (`benchmarks.machines`), all on this machine's cores.
Time until the last machine has everything in memory that it had touched before; start-up, connecting and allocating are not
counted. Side by side, best of several rounds each:

- relays: the trainer's publish, and the chain of relays, checksums verified, versions visible; all by TCP, though the
  namespaces are of one host (with "auto" too nothing would be shared: another namespace is another machine).
- gloo: `torch.distributed.broadcast` among five processes.
- redis: 16 MB values in Valkey on the trainer's machine, read by each.
- storage: a safetensors file that a server on the trainer's machine hands to each, as shared storage does.

Ray's object store is not among them (it would need a raylet in each namespace); `benchmarks.relay` has it on one machine.
Bar: the relays' time over the fastest of the others', at most 1. The printed value is that ratio.
"""

import argparse
import functools
import http.client
import http.server
import itertools
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.machines import CARD, Machines, on_machine, simulated_machines
from benchmarks.relay import model
from benchmarks.relay_nodes import running_chain
from benchmarks.relay_sides import NUM_READERS, gloo_broadcast, redis_chunks, touched, with_readers

MEGABYTES = 64
BYTES_PER_SECOND = 100e6
BAR = 1.0
PORT = 8799


def relays(machines: Machines, repeats: int) -> float:
    """Publish to the last machine."""
    seconds = []
    with running_chain(model(MEGABYTES), NUM_READERS, machines=machines) as chain:
        for _ in range(repeats + 1):  # the first uses pieces of the default length
            started = time.perf_counter()
            chain.publish()
            chain.wait()
            seconds.append(time.perf_counter() - started)
            time.sleep(0.5)  # measured constants travel with the heartbeats
    return min(seconds)


def storage(machines: Machines, repeats: int) -> float:
    """A file server on the trainer's machine; the trainer's write goes into its page cache."""
    from safetensors.torch import save_file

    source = {"a": touched(MEGABYTES * 1024**2)}
    with tempfile.TemporaryDirectory() as folder:
        context, where = multiprocessing.get_context("fork"), machines.host(0)
        server = context.Process(target=_serve_files, args=(where, folder), daemon=True)
        server.start()
        turns = iter(range(repeats))

        def send() -> None:
            save_file(source, Path(folder) / "partial")
            (Path(folder) / "partial").rename(Path(folder) / f"{next(turns)}.safetensors")

        try:
            return with_readers(_read_http, NUM_READERS, source["a"].nbytes, where, send, repeats, machines.enter)
        finally:
            server.kill()
            server.join()


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _serve_files(host: str, folder: str) -> None:
    handler = functools.partial(_Files, directory=folder)
    http.server.ThreadingHTTPServer((host, PORT), handler).serve_forever()


def _read_http(pipe: Connection, index: int, num_bytes: int, where: str) -> None:
    target = memoryview(touched(num_bytes + 4096).numpy())
    pipe.send("ready")
    for turn in itertools.count():
        pipe.recv()
        while True:
            connection = http.client.HTTPConnection(where, PORT, timeout=30)
            connection.request("GET", f"/{turn}.safetensors")
            response = connection.getresponse()
            if response.status == 200:
                break
            time.sleep(0.001)
        done = 0
        while read := response.readinto(target[done:]):
            done += read
        assert done >= num_bytes
        connection.close()
        pipe.send("done")


def main() -> int:
    """Print one JSON line last; exit code 0 whatever the outcome."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer repeats: ends within 55 s on two quiet cores")
    repeats = 2 if parser.parse_args().quick else 5
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = CARD
    started, num_bytes, seconds = time.perf_counter(), MEGABYTES * 1024**2, {}
    try:
        with simulated_machines(NUM_READERS + 1, BYTES_PER_SECOND) as machines, on_machine(machines, 0):
            arms: dict[str, Callable[[], float]] = {
                "relays": lambda: relays(machines, repeats),
                "gloo": lambda: gloo_broadcast(num_bytes, repeats, machines.enter),
                "redis": lambda: redis_chunks(num_bytes, repeats, machines.enter, machines.host(0)),
                "storage": lambda: storage(machines, repeats),
            }
            for name, measure in arms.items():
                seconds[name] = measure()
                print(name, seconds[name], flush=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no network namespaces here ({error}): run it as root")
        print(json.dumps({"name": "relay_network", "value": None, "unit": "ratio", "bar": BAR, "holds": None}))
        return 0
    ratio = seconds["relays"] / min(value for name, value in seconds.items() if name != "relays")
    result = {
        "name": "relay_network",
        "value": round(ratio, 3),
        "unit": "x the fastest other way to four machines",
        "bar": BAR,
        "holds": ratio <= BAR,
        "figures": seconds,
        "one_copy_seconds": num_bytes / BYTES_PER_SECOND,
        "seconds": round(time.perf_counter() - started, 1),
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "torch": torch.__version__, "threads": 1},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
