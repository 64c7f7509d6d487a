"""Data of reasoning_gym's tasks: `python -m rollout.reasoning_data OUT_DIR --task basic_arithmetic --task chain_sum`.

Rows have a `prompt` and the task's `entry`, for reward `reasoning_gym`. Held-out rows come from another seed.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.tiny import write_jsonl

_HELD_OUT_SEED = 1_000_003
"""Added to the seed for held-out rows."""


def make_rows(tasks: Sequence[str], count: int, seed: int, instruction: str) -> list[dict[str, Any]]:
    """`count` rows, taken from the tasks in turn, the same for the same seed."""
    import reasoning_gym

    each = -(-count // len(tasks))
    sets = [reasoning_gym.create_dataset(task, size=each, seed=seed) for task in tasks]
    entries = itertools.chain.from_iterable(zip(*sets, strict=True))
    return [
        {"prompt": f"{entry['question']}{instruction}", "entry": json.loads(json.dumps(entry, default=str))}
        for entry in itertools.islice(entries, count)
    ]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Make prompts of reasoning_gym's tasks.")
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--task", action="append", required=True, help="a task's name; several may be given")
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--num-heldout", type=int, default=100)
    parser.add_argument("--instruction", default="\n\nEnd with <answer>your answer</answer>.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (
        ("train", arguments.num_train, arguments.seed),
        ("heldout", arguments.num_heldout, arguments.seed + _HELD_OUT_SEED),
    ):
        write_jsonl(arguments.folder / f"{name}.jsonl", make_rows(arguments.task, count, seed, arguments.instruction))
    print(f"{arguments.folder}: {arguments.num_train} prompts, {arguments.num_heldout} held out")


if __name__ == "__main__":
    main()
