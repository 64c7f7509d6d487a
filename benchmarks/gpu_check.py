"""Do the GPU paths work? `python -m benchmarks.gpu_check` on a machine with one or two GPUs; not a benchmark, but a proof.

Who wrote these paths had no GPU: run this before you rely on them. Each check is a process of its own under a deadline:

- pinned: a slot file of shared memory, registered once, its tensors copied to the GPU and back, byte for byte.
- publish: tensors on the GPU into the relay's store, checksums verified.
- collective: weights from one process's GPU to another's by NCCL, as a relay's edge does it (two GPUs).
- deepspeed: a training step of a tiny model on the GPU, its probe compared with a plain forward pass.
- packed: rows one behind the other by flash attention (needs `flash-attn`), against the same rows alone.
- sglang: the server on the GPU, an update from the relay's store by file and one by pinned slots, each with the log-probs of
  fixed tokens compared with the trainer's (needs `make sglang`; name its interpreter by --sglang-python).

Exit code 0: everything that ran holds (what was left out is said); 1: something failed; 2: there is no GPU.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers.utils import is_flash_attn_2_available

from benchmarks import gpu_checks

CHECK_SECONDS = 600.0
NO_GPU = 2


def reasons_to_skip(num_gpus: int, sglang_python: str) -> Mapping[str, str]:
    """Checks that cannot run here, and why."""
    reasons = {}
    if num_gpus < 2:
        reasons["collective"] = f"NCCL needs two GPUs, one a process; this machine has {num_gpus}"
    if not is_flash_attn_2_available():
        reasons["packed"] = "flash-attn is not installed: rows are padded"
    if not Path(sglang_python).is_file():
        reasons["sglang"] = f"{sglang_python} is not there: run `make sglang`, or name the interpreter by --sglang-python"
    return reasons


def run_check(name: str, sglang_python: str) -> str:
    """Run one check in a process of its own; empty if it holds, else what went wrong."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", name, "--sglang-python", sglang_python]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it did not end within {CHECK_SECONDS:g} s"
    return "" if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip())[-2000:]


def main(count_gpus: Callable[[], int] = torch.cuda.device_count) -> int:
    """Run what can run here; the last line is one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sglang-python", default=".venv-sglang/bin/python", help="interpreter of SGLang's environment")
    parser.add_argument("--only", choices=list(gpu_checks.CHECKS), help="one check, in this process")
    options = parser.parse_args()
    num_gpus = count_gpus()
    if num_gpus == 0:
        print("there is no GPU that PyTorch can use here, so nothing was checked")
        return NO_GPU
    if options.only:
        gpu_checks.CHECKS[options.only](gpu_checks.Place(options.sglang_python))
        return 0
    skipped = reasons_to_skip(num_gpus, options.sglang_python)
    outcomes = {}
    for name in gpu_checks.CHECKS:
        outcomes[name] = (
            f"skipped: {skipped[name]}" if name in skipped else run_check(name, options.sglang_python) or "holds"
        )
        print(f"{name}: {outcomes[name]}", flush=True)
    failed = [name for name, outcome in outcomes.items() if outcome != "holds" and name not in skipped]
    devices = [torch.cuda.get_device_name(index) for index in range(num_gpus)]
    result = {"name": "gpu_check", "holds": not failed, "outcomes": outcomes, "devices": devices, "torch": torch.__version__}
    print(json.dumps(result))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
