"""How fast do weights travel? `python -m benchmarks.relay [--quick]`.

256 MB of float32, slots kept. One relay process for each simulated machine, all on this machine's cores (pinned in turn);
one thread each. Start-up, connecting and allocating are not counted. For publish, chain and length every hop is TCP by
ZeroMQ on the loopback (`relay.transport = "zmq"`), as it is between machines; for peers it is what a user of one host gets
("auto"): relays of one host share memory.

- publish: the trainer's stall for one version, every earlier one having reached all relays, over one plain copy of the same
  bytes into touched memory, alternating. Bar: 1.3x. The same with 1 and with 8 relays attached (32 MB). Bar: within 10 %.
  Contended: the same while the version before is still on its way; reported only.
- chain: bytes x hops / (publish to the last of 4 relays), over one raw socket stream into touched memory. Bar: 0.6x.
- length: with every hop throttled to 50 MB/s (64 MB), time to the last of 8 relays over that to the last of 2. Bar: 1.3x.
- pull: the CPU engine from a version in shared memory to its first log-probs, over the same from the heap. Bar: 1.2x + 50 ms
  (the ratio is printed with the 50 ms taken off).
- peers: time until the last of 4 readers has everything, against Redis values, a safetensors file on disk, a gloo broadcast
  and Ray's object store. Bar: ahead of each. All four readers are on one machine: relays, file and object store share its
  memory, the others send by the loopback. `benchmarks.relay_network` gives every reader a machine's network, and nothing
  to share. `last_relay_seconds` of `publish` is the chain by TCP.

The printed value is the chain's ratio.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch

from benchmarks.relay_nodes import Chain, running_chain
from benchmarks.relay_pull import measure_pull
from benchmarks.relay_sides import PEERS, raw_stream

BARS = {"publish": 1.3, "attached": 1.1, "chain": 0.6, "length": 1.3, "pull": 1.2, "peers": 1.0}
PULL_ALLOWANCE_SECONDS = 0.05
THROTTLE = 50e6


def model(megabytes: int) -> list[tuple[str, torch.Tensor]]:
    """Sixteen tensors, that many megabytes in all."""
    return [(f"layer{index}", torch.full((megabytes * 1024**2 // 64,), float(index))) for index in range(16)]


def measure_publish(chain: Chain, tensors: list[tuple[str, torch.Tensor]], repeats: int) -> dict[str, float]:
    """Stalls of quiescent and of contended publishes, and plain copies beside them."""
    source = torch.cat([tensor for _, tensor in tensors])
    target = torch.ones_like(source)
    copies, stalls, walls = [], [], []
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - started)
        stalls.append(chain.publish())
        walls.append(chain.wait())
    contended = [chain.publish() for _ in range(repeats)]
    chain.wait()
    return {
        "copy_seconds": statistics.median(copies),
        "stall_seconds": statistics.median(stalls),
        "contended_seconds": statistics.median(contended),
        "last_relay_seconds": statistics.median(walls),
        "best_last_relay_seconds": min(walls),
    }


def measure_attached(repeats: int) -> dict[str, float]:
    """Median stall with 1 and with 8 relays attached, and the throttled broadcast to the last of 2 and of 8."""
    figures = {}
    for num_relays in (1, 8):
        tensors = model(32)
        with running_chain(tensors, num_relays) as chain:
            figures[f"stall_seconds_{num_relays}"] = measure_publish(chain, tensors, repeats)["stall_seconds"]
    for num_relays in (2, 8):
        tensors = model(64)
        with running_chain(tensors, num_relays, bytes_per_second=THROTTLE) as chain:
            chain.publish()
            figures[f"throttled_seconds_{num_relays}"] = chain.wait()
    return figures


def main() -> int:
    """Print one JSON line last; exit code 0 whatever the outcome."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer repeats: ends within 55 s on two quiet cores")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    started = time.perf_counter()
    repeats = 3 if quick else 9
    tensors = model(256)
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    with running_chain(tensors, 4) as chain:
        publish = measure_publish(chain, tensors, repeats)
    with running_chain(tensors, 4, transport="auto") as chain:
        shared = measure_publish(chain, tensors, repeats)
    clock = lambda: f"{time.perf_counter() - started:.0f} s:"  # noqa: E731
    print(clock(), "publish and chain", publish, flush=True)
    print(clock(), "the same with shared memory", shared, flush=True)
    raw_seconds = raw_stream(num_bytes, repeats)
    pull = measure_pull(repeats)
    print(clock(), "pull", pull, flush=True)
    peers = {}
    for name, measure in PEERS.items():
        peers[name] = measure(num_bytes, 1 if name == "redis_chunks" else 2 if quick else 5)
        print(clock(), name, peers[name], flush=True)
    attached = measure_attached(repeats)
    print(clock(), "attached", attached, flush=True)
    ours = shared["stall_seconds"] + shared["best_last_relay_seconds"]
    ratios: dict[str, Any] = {
        "publish": publish["stall_seconds"] / publish["copy_seconds"],
        "attached": attached["stall_seconds_8"] / attached["stall_seconds_1"],
        "chain": 4 * raw_seconds / publish["best_last_relay_seconds"],
        "length": attached["throttled_seconds_8"] / attached["throttled_seconds_2"],
        "pull": (pull["pull_seconds"] - PULL_ALLOWANCE_SECONDS) / pull["heap_seconds"],
        "peers": ours / min(peers.values()),
    }
    holds = {name: ratio >= BARS[name] if name == "chain" else ratio <= BARS[name] for name, ratio in ratios.items()}
    result = {
        "name": "relay",
        "value": round(ratios["chain"], 3),
        "unit": "x one raw socket stream, bytes x 4 hops / time",
        "bar": BARS["chain"],
        "holds": all(holds.values()),
        "bars": BARS,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "holds_each": holds,
        "figures": {
            "publish": publish,
            "shared": shared,
            "raw_seconds": raw_seconds,
            "pull": pull,
            "peers": peers,
            "attached": attached,
            "ours": ours,
        },
        "seconds": round(time.perf_counter() - started, 1),
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "torch": torch.__version__, "threads": 1},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
