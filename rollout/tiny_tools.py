"""The `tools` recipe's model and data: `python -m rollout.tiny_tools OUT_DIR`.

A Llama of 80k parameters with a chat template of its own, taught for a few seconds to talk to a calculator, badly: half of
its calls have the wrong operator, and not every answer repeats the result. Reinforcement learning is to mend both.
Heavy imports happen only when making.
"""

import argparse
import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.tiny import make_llama, write_jsonl
from rollout.tools.calculator import calculate
from rollout.tools.calls import write_call

START, END, PAD = "<|im_start|>", "<|im_end|>", "<pad>"
OPERATORS = ("+", "*")
LARGEST = 81
CALL_BEGIN, CALL_END = write_call("calculate", {"expression": "|"}).split("|")
_WORDS = ("system", "user", "assistant", "tool", "\n", CALL_BEGIN, CALL_END, " ", *OPERATORS)
VOCABULARY = {
    token: index for index, token in enumerate((PAD, END, START, *_WORDS, *(str(number) for number in range(LARGEST + 1))))
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NUM_HELD_OUT = 20
_NUM_LESSONS, _NUM_UPDATES, _BATCH = 1000, 100, 32
Row = dict[str, str]


def make_rows(seed: int = 0) -> tuple[list[Row], list[Row]]:
    """All 162 sums and products of two digits, shuffled: 142 to train on, 20 held out."""
    rows = []
    for first, operator, second in itertools.product(range(1, 10), OPERATORS, range(1, 10)):
        question = f"{first} {operator} {second}"
        rows.append({"prompt": question, "answer": calculate(question)})
    random.Random(seed).shuffle(rows)
    return rows[_NUM_HELD_OUT:], rows[:_NUM_HELD_OUT]


def clumsy_dialogue(row: Row, draw: random.Random) -> list[str]:
    """Question, call, result and answer, as the teacher of the first lessons tells it."""
    first, _, second = row["prompt"].split()
    expression = f"{first} {draw.choice(OPERATORS)} {second}"
    result = calculate(expression)
    answer = result if draw.random() < 0.8 else str(draw.randint(0, LARGEST))
    return [row["prompt"], write_call("calculate", {"expression": expression}), result, answer]


def make_model(folder: Path, rows: Sequence[Row], seed: int = 0) -> int:
    """Write the taught model and its tokenizer as a Hugging Face checkpoint.

    Returns:
        The number of parameters.
    """
    # Larger first weights than usual: copying is learned within a hundred updates.
    model = make_llama(VOCABULARY, end=END, pad=PAD, seed=seed, initializer_range=0.1)
    tokenizer = _make_tokenizer(folder)
    _teach(model, tokenizer, rows, random.Random(seed))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _teach(model: Any, tokenizer: Any, rows: Sequence[Row], draw: random.Random) -> None:
    """Next-token prediction on clumsy dialogues; only what the assistant says counts."""
    import torch

    lessons = [_lesson(tokenizer, clumsy_dialogue(row, draw)) for row in draw.choices(rows, k=_NUM_LESSONS)]
    ids, labels = (torch.tensor([lesson[part] for lesson in lessons]) for part in (0, 1))  # of one length: a word is a token
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in torch.randint(len(lessons), (_NUM_UPDATES, _BATCH)):
        loss = model(input_ids=ids[batch], labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _lesson(tokenizer: Any, texts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Ids of a dialogue, and the same where the assistant speaks, -100 elsewhere."""
    ids, labels = [], []
    for role, text in zip(("user", "assistant", "tool", "assistant"), texts, strict=True):
        head, said, tail = tokenizer([f"{START}{role}\n", f"{text}{END}", "\n"])["input_ids"]
        ids += head + said + tail
        labels += [-100] * len(head) + (said if role == "assistant" else [-100] * len(said)) + [-100] * len(tail)
    return ids, labels


def _make_tokenizer(folder: Path) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    longest_first = sorted(_WORDS, key=len, reverse=True)
    pattern = "|".join([*(re.escape(word) for word in longest_first), r"\d+", r"[\s\S]"])
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def main() -> None:
    """Make everything in the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Make the tools recipe's model and data.")
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, lessons and split")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train, held_out = make_rows(arguments.seed)
    num_parameters = make_model(arguments.folder, train, arguments.seed)
    write_jsonl(arguments.folder / "train.jsonl", train)
    write_jsonl(arguments.folder / "heldout.jsonl", held_out)
    print(f"{arguments.folder}: {num_parameters} parameters, {len(train)} prompts, {len(held_out)} held out")


if __name__ == "__main__":
    main()
