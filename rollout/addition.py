"""The demo's data: few-shot addition as raw text, `python -m rollout.addition OUT_DIR --tokenizer MODEL_DIR`.

A prompt is two solved sums and an open one; the answer is the text before the newline. Held-out prompts ask only for sums
whose operands, in either order, train prompts never show, neither as a question nor as an example.
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

from rollout.tiny import write_jsonl

MAX_OPERAND = 20
NUM_EXAMPLES = 2
Pair = tuple[int, int]


def make_rows(num_train: int, num_held_out: int, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows with columns `prompt` and `answer`."""
    draw = random.Random(seed)
    sums = list(itertools.combinations_with_replacement(range(1, MAX_OPERAND + 1), 2))
    draw.shuffle(sums)
    asked = len(sums) // 3
    held_out_pairs, train_pairs = _both_orders(sums[:asked]), _both_orders(sums[asked:])
    held_out = [
        _row(pair, train_pairs, draw) for pair in draw.sample(held_out_pairs, min(num_held_out, len(held_out_pairs)))
    ]
    train = [_row(pair, train_pairs, draw) for pair in draw.choices(train_pairs, k=num_train)]
    return train, held_out


def _both_orders(pairs: Sequence[Pair]) -> list[Pair]:
    return sorted({pair for first, second in pairs for pair in ((first, second), (second, first))})


def _row(pair: Pair, examples: Sequence[Pair], draw: random.Random) -> dict[str, str]:
    shown = draw.sample([example for example in examples if example != pair], NUM_EXAMPLES)
    lines = [f"{first} + {second} = {first + second}\n" for first, second in shown]
    return {"prompt": "".join(lines) + f"{pair[0]} + {pair[1]} =", "answer": str(sum(pair))}


def main() -> None:
    """Write both files, and say which token ids end an answer."""
    parser = argparse.ArgumentParser(description="Make few-shot addition prompts.")
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--tokenizer", help="model folder; prints the token ids that hold a newline, for stop_token_ids")
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--num-heldout", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train, held_out = make_rows(arguments.num_train, arguments.num_heldout, arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(arguments.folder / "train.jsonl", train)
    write_jsonl(arguments.folder / "heldout.jsonl", held_out)
    print(f"{arguments.folder}: {len(train)} prompts, {len(held_out)} held out")
    if arguments.tokenizer:
        from rollout.tokens import load_tokenizer

        newline = load_tokenizer(arguments.tokenizer).encode_observation("\n")
        print(f"rollout.sampling.stop_token_ids = {newline.tolist()}")


if __name__ == "__main__":
    main()
