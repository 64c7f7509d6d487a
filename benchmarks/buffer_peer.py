"""TransferQueue beside us: this file runs in an interpreter that has it, and prints trajectories a second by length.

It is a library of columns: token ids, log-probs and a reward of a batch are put under keys (`kv_batch_put`), read by keys
(`kv_batch_get`) and cleared (`kv_clear`). It neither leases nor deduplicates nor keeps anything on disk. Its storage units
and its controller are Ray actors; start-up is not counted. Rows of one length, the friendliest case for it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPEATS = 3
BATCH = {200: 256, 16_000: 32}


def measure_peer(python: str, counts: dict[int, int], seconds: float) -> dict[str, float] | None:
    """Run the peer in its interpreter; None without one.

    Raises:
        subprocess.SubprocessError: it failed, or took longer than `seconds`.
    """
    if not python:
        return None
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "TQ_LOGGING_LEVEL": "ERROR"}
    command = [python, str(Path(__file__)), json.dumps(counts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds + 40, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        raise subprocess.SubprocessError(f"TransferQueue failed: {done.stderr[-2000:]}")
    rates: dict[str, float] = json.loads(lines[-1])
    return rates


def main() -> None:
    """Measure; print one JSON object."""
    import ray
    import torch
    import transfer_queue
    from tensordict import TensorDict

    counts = {int(tokens): count for tokens, count in json.loads(sys.argv[1]).items()}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()

    def rows(tokens: int, count: int) -> Any:
        columns = {
            "token_ids": torch.randint(0, 150_000, (count, tokens), dtype=torch.int32),
            "logprobs": torch.rand(count, tokens),
            "reward": torch.rand(count, 1),
        }
        return TensorDict(columns, batch_size=count)

    def run(tokens: int, count: int, name: str) -> float:
        size = BATCH[tokens]
        batches = [rows(tokens, size) for _ in range(count // size)]
        started = time.perf_counter()
        for place, batch in enumerate(batches):
            keys = [f"{name}_{place}_{i}" for i in range(size)]
            transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=batch, tags=[{} for _ in keys])
            transfer_queue.kv_batch_get(keys=keys, partition_id="train")
            transfer_queue.kv_clear(keys=keys, partition_id="train")
        return time.perf_counter() - started

    rates = {}
    for tokens, count in counts.items():
        run(tokens, BATCH[tokens], f"warm{tokens}")
        seconds = sorted(run(tokens, count, f"{tokens}_{repeat}") for repeat in range(REPEATS))
        rates[str(tokens)] = count / seconds[len(seconds) // 2]
    print(json.dumps(rates), flush=True)
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
