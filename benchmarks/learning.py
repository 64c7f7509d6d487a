"""What does staleness cost? `python -m benchmarks.learning [--quick]` (needs models/tiny, see `rollout/tiny.py`).

The tiny task in one process: the torch engine samples, the real training step trains, and every batch waits a fixed number
of versions before it is trained, so that all its tokens are exactly so stale. Plain GRPO (ratio to the rollout log-probs,
clipped) against the decoupled loss with token TIS, at staleness 0, 1, 4 and 16; three seeds, 40 versions. Nothing is timed.
`--arms` adds, or picks, others: the decoupled loss with whole weights, or with those of sequences.

Bar: averaged over staleness and seeds, the decoupled loss with token TIS ends no lower than plain GRPO, less 0.02 of reward.
"""

import argparse
import json
import statistics
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from laminar.config.root import LaminarConfig
from laminar.config.sizes import plays_greedy
from laminar.seeds import prompt_order, trajectory_seed
from laminar.types import Chain, FinishReason, Prompt, Purpose, SamplingParameters, Trajectory, WeightVersion, given, sampled
from rollout.engines.torch_engine import TorchEngine
from rollout.engines.wire import GenerateWire, SamplingWire
from rollout.tiny import reward
from trainer.engine import TrainerEngine
from trainer.ranks import Ranks, join_ranks
from trainer.session import build_algorithm
from trainer.step import train_step

PROMPTS, NEW_TOKENS, STOP = 8, 8, [14]
MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"kind": "grpo"}},
    "decoupled_token_tis": {"algorithm": {"kind": "decoupled_ppo"}, "correction": {"weight": "token_tis"}},
    "decoupled_untruncated": {
        "algorithm": {"kind": "decoupled_ppo"},
        "correction": {"weight": "token_tis", "weight_max": 1e9},
    },
    "decoupled_sequence_tis": {"algorithm": {"kind": "decoupled_ppo"}, "correction": {"weight": "sequence_tis"}},
}
BAR, MARGIN, LAST = 0.0, 0.02, 5
"""The bar, what the decoupled loss may lack, and how many versions an end is the mean of."""


def make_config(model_folder: Path, trainer: dict[str, Any], seed: int) -> LaminarConfig:
    """The tiny recipe's settings, with some of the trainer's replaced."""
    return LaminarConfig.model_validate(
        {
            "run": {"seed": seed},
            "model": {"path": str(model_folder)},
            "data": {"path": "-"},
            "staleness": {"max_staleness": "unbounded"},
            "trainer": {"learning_rate": 3e-3, "critic_learning_rate": 1e-2} | trainer,
        }
    )


def temperature(member: int, group_size: int) -> float:
    """1 for a group's attempts, 0 for the greedy answer behind them."""
    return 1.0 if member < group_size else 0.0


def cost(text: str) -> float:
    """Share of an answer's characters that are a 9: the easy way to be right, which `safe_rlhf` is to keep rare."""
    answer = text.split("\n", 1)[0]
    return answer.count("9") / len(answer) if answer else 0.0


class Sampler:
    """Groups of the tiny task, from the newest weights."""

    def __init__(self, model_folder: Path, work: Path, seed: int, group_size: int, *, greedy: bool) -> None:
        self._rows = [json.loads(line) for line in (model_folder / "train.jsonl").read_text().splitlines()]
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self._engine, self._work, self._seed, self._size = TorchEngine(model_folder, "0.0"), work, seed, group_size
        self._members = group_size + greedy
        self._source, self._version, self._admission = model_folder, WeightVersion(0, 0), 0

    def swap(self, tensors: dict[str, Any], number: int) -> None:
        """Take new weights."""
        folder = self._work / f"version-{number % 2}"
        folder.mkdir(exist_ok=True)
        for file in self._source.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        self._version = WeightVersion(0, number)
        self._engine.book.update_weights(folder, str(self._version), flush_cache=True)

    def play(self) -> list[tuple[Trajectory, ...]]:
        """One batch of groups."""
        asked = []
        for _ in range(PROMPTS):
            epoch, place = divmod(self._admission, len(self._rows))
            row = self._rows[prompt_order(0, epoch, len(self._rows), True)[place]]
            ids = self._tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            names = [f"{self._admission:08d}-{member:03d}" for member in range(self._members)]
            seeds = [trajectory_seed(self._seed, name, 0) for name in names]
            wires = [
                GenerateWire(
                    ids, n, SamplingWire(NEW_TOKENS, temperature(m, self._size), stop_token_ids=STOP, sampling_seed=s)
                )
                for m, (n, s) in enumerate(zip(names, seeds, strict=True))
            ]
            asked.append((row, ids, names, [self._engine.add(wire) for wire in wires]))
            self._admission += 1
        while self._engine.book.has_work:
            self._engine.step()
        return [self._group(*group) for group in asked]

    def _group(self, row: dict[str, str], ids: list[int], names: list[str], outputs: list[Any]) -> tuple[Trajectory, ...]:
        members = []
        for member, (name, output) in enumerate(zip(names, outputs, strict=True)):
            text = self._tokenizer.decode(output.ids, skip_special_tokens=True)
            chain = Chain((given(ids), sampled(output.ids, output.logprobs, self._version)))
            sampling = SamplingParameters(temperature(member, self._size), NEW_TOKENS, 0)
            score = reward(Prompt("", row["prompt"], row), text)
            purpose = Purpose.TRAIN if member < self._size else Purpose.GREEDY_BASELINE
            members.append(
                Trajectory(
                    name, name[:8], row["prompt"], member, 1, purpose, sampling, (chain,), FinishReason.STOP, score,
                    {"cost": cost(text)},
                )
            )  # fmt: skip
        return tuple(members)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()


def learn(
    model_folder: Path,
    work: Path,
    ranks: Ranks,
    trainer: dict[str, Any],
    *,
    seed: int,
    steps: int,
    lag: int = 0,
    group_size: int = 8,
    costs: list[float] | None = None,
) -> list[float]:
    """Train some steps, each on a batch that is `lag` versions old; the mean reward of what each version sampled.

    `costs`, if given, gets the mean cost of the same.
    """
    config = make_config(model_folder, trainer, seed)
    algorithm = build_algorithm(config)
    engine = TrainerEngine(config, ranks, algorithm.needs)
    sampler = Sampler(model_folder, work, seed, group_size, greedy=plays_greedy(config))
    waiting: deque[list[tuple[Trajectory, ...]]] = deque()
    rewards = []
    for step in range(1, steps + lag + 1):
        if step <= steps:
            waiting.append(sampler.play())
            sampled_ones = [t for group in waiting[-1] for t in group if t.purpose is Purpose.TRAIN]
            rewards.append(statistics.mean(t.reward or 0.0 for t in sampled_ones))
            if costs is not None:
                costs.append(statistics.mean(t.reward_terms["cost"] for t in sampled_ones))
        if step > lag:
            groups = [group for group in waiting.popleft() if algorithm.keeps(group)]
            if groups:
                train_step(engine, algorithm, groups, step - lag)
            sampler.swap(dict(engine.state_tensors()), step - lag)
    sampler.close()
    return rewards


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description="What does staleness cost?")
    parser.add_argument("--quick", action="store_true", help="staleness 0 and 4, one seed, 25 versions")
    parser.add_argument(
        "--arms", nargs="+", choices=ALGORITHMS, default=["grpo", "decoupled_token_tis"], help="which to run"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    lags, seeds, steps = ((0, 4), (0,), 25) if quick else ((0, 1, 4, 16), (0, 1, 2), 40)
    torch.set_num_threads(1)
    ranks = join_ranks(0, 1)
    ends: dict[str, dict[int, list[float]]] = {}
    for name, trainer in ((name, ALGORITHMS[name]) for name in arguments.arms):
        for lag in lags:
            for seed in seeds:
                with tempfile.TemporaryDirectory() as work:
                    rewards = learn(MODEL, Path(work), ranks, trainer, seed=seed, steps=steps, lag=lag)
                ends.setdefault(name, {}).setdefault(lag, []).append(statistics.mean(rewards[-LAST:]))
            print(name, f"staleness {lag}:", " ".join(f"{end:.3f}" for end in ends[name][lag]), flush=True)
    ranks.leave()
    means = {name: statistics.mean(end for found in of_lag.values() for end in found) for name, of_lag in ends.items()}
    judged = {"grpo", "decoupled_token_tis"} <= means.keys()
    value = means["decoupled_token_tis"] - means["grpo"] + MARGIN if judged else None
    holds = value >= BAR if value is not None else None
    result = {"name": "learning", "value": value, "unit": "reward", "bar": BAR, "holds": holds, "means": means, "ends": ends}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
