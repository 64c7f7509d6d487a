"""How fast is a training step? `python -m benchmarks.trainer [--quick]`.

Trained tokens/s of our whole step against a plain PyTorch loop doing the same arithmetic, and against TRL 1.16's step on the
same batch of long-tailed answers (`benchmarks/trainer_arms.py` says what each does). The sides take turns, each round in
another order; medians of rounds; one thread; start-up and a first step of each are not counted; freed memory is kept for the
next step, as in our trainer's processes. And the peak of resident memory of one forward and backward with the vocabulary in
chunks against all at once.

Bars: at least 0.95 of the plain loop (prompts shared by neither), at least 1.5 times TRL (as each comes).
"""

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.trainer_arms import LONGEST, PROMPT_TOKENS, Group, Ours, Plain, Trl, make_config, make_groups, write_model
from laminar.allocator import keep_freed_memory
from trainer.model import load_model
from trainer.policy import Policy
from trainer.ranks import join_ranks

PLAIN_BAR, TRL_BAR = 0.95, 1.5
VOCABULARY, HIDDEN, LAYERS = 4096, 128, 4
ROWS = 8
"""Rows of a micro-batch of TRL's; ours hold as many tokens as these, padded to the longest answer."""
MEMORY_VOCABULARY, MEMORY_TOKENS, CHUNK_BYTES = 49152, 1024, 16 * 1024**2


class Side(Protocol):
    """One way to train."""

    def step(self) -> float:
        """Train once; the loss."""
        ...


def measure(sides: dict[str, Side], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each side's steps, round by round, and the loss of its first one."""
    losses = {name: side.step() for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.perf_counter()
            sides[name].step()
            seconds[name].append(time.perf_counter() - started)
    return seconds, losses


def peak_bytes(policy: Policy) -> int:
    """Growth of resident memory, at its peak, over one forward and backward pass."""
    torch.manual_seed(0)
    ids = torch.randint(0, MEMORY_VOCABULARY, (4, MEMORY_TOKENS // 4 + 1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    before = resident("VmRSS")
    logprobs, _ = policy(ids, mask, torch.ones(4))
    logprobs.sum().backward()
    policy.zero_grad()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measure_memory(folder: Path) -> dict[str, float]:
    """Peaks with chunks and without, each the median of three turns."""
    from laminar.config.system import ModelConfig

    model = load_model(ModelConfig(path=str(folder)), gradient_checkpointing=False)
    policies = {"chunked": Policy(model, CHUNK_BYTES), "whole": Policy(model, 1 << 40)}
    peaks: dict[str, list[int]] = {name: [] for name in policies}
    for _ in range(4):
        for name, policy in policies.items():
            peaks[name].append(peak_bytes(policy))
    return {name: statistics.median(found[1:]) for name, found in peaks.items()}


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description="How fast is a training step?")
    parser.add_argument("--quick", action="store_true", help="2 groups, 15 rounds; else 4 groups, 25 rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    keep_freed_memory()
    prompts, rounds = (2, 15) if quick else (4, 25)
    ranks = join_ranks(0, 1)
    with tempfile.TemporaryDirectory() as work:
        folder = write_model(Path(work, "model"), vocabulary=VOCABULARY, hidden=HIDDEN, layers=LAYERS)
        groups: list[Group] = make_groups(VOCABULARY, prompts=prompts, group_size=8)
        tokens = sum(trajectory.num_sampled_tokens for group in groups for trajectory in group)
        longest = max(trajectory.num_sampled_tokens for group in groups for trajectory in group)
        settings = {"max_tokens": ROWS * (PROMPT_TOKENS + longest)}
        unshared = make_config(folder, share_prompts=False, **settings)
        sides: dict[str, Side] = {
            "ours, prompts not shared": Ours(unshared, ranks, groups),
            "plain loop": Plain(unshared, groups),
            "ours": Ours(make_config(folder, share_prompts=True, **settings), ranks, groups),
            "TRL": Trl(folder, Path(work, "trl"), groups, ROWS),
        }
        seconds, losses = measure(sides, rounds)
        big = write_model(Path(work, "big"), vocabulary=MEMORY_VOCABULARY, hidden=64, layers=1)
        memory = measure_memory(big)
    ranks.leave()
    median = {name: statistics.median(found) for name, found in seconds.items()}
    for name, value in median.items():
        print(f"{name:>26}: {tokens / value:8.0f} trained tokens/s   (first loss {losses[name]:.6f})")
    print(f"{'peak memory':>26}: {memory['chunked'] / 1e6:.0f} MB in chunks, {memory['whole'] / 1e6:.0f} MB at once")
    to_plain = ratio(seconds, "plain loop", "ours, prompts not shared")
    to_trl = ratio(seconds, "TRL", "ours")
    result = {
        "name": "trainer",
        "value": to_plain,
        "unit": "of the plain loop's tokens/s",
        "bar": PLAIN_BAR,
        "holds": to_plain >= PLAIN_BAR and to_trl >= TRL_BAR,
        "over_trl": to_trl,
        "trl_bar": TRL_BAR,
        "seconds": seconds,
        "first_losses": losses,
        "trained_tokens": tokens,
        "longest_tokens": min(longest, LONGEST),
        "peak_bytes": memory,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result))


def ratio(seconds: dict[str, list[float]], other: str, own: str) -> float:
    """How many times as fast as the other one is: the median over rounds of both sides' times in the same round."""
    return statistics.median(theirs / ours for theirs, ours in zip(seconds[other], seconds[own], strict=True))


if __name__ == "__main__":
    main()
