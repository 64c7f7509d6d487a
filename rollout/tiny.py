"""The `tiny` recipe's model and data: `python -m rollout.tiny OUT_DIR`.

A random Llama of 76k parameters with one token a character, and a task that it learns within seconds: a prompt like `37>`
wants digits no smaller than its last one. Chance is right often enough (0.23) for the first steps to teach something.
Heavy imports happen only when making, so that the reward can be imported without torch.
"""

import argparse
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.types import Prompt

CHARACTERS = "0123456789> \n+-=abcdef"
END, PAD = "<end>", "<pad>"
VOCABULARY = {token: index for index, token in enumerate((PAD, END, *CHARACTERS))}
NEWLINE_ID = VOCABULARY["\n"]
"""Ends an answer, beside the end id."""
_NUM_HELD_OUT = 20


def reward(prompt: Prompt, completion: str) -> float:
    """Share of the answer's characters, up to a newline, that are digits no smaller than the prompt's; 0 if it is empty."""
    answer = completion.split("\n", 1)[0]
    good = sum(character.isdigit() and character >= prompt.fields["digit"] for character in answer)
    return good / len(answer) if answer else 0.0


def make_rows(seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All 100 prompts `<digit><digit>>`, shuffled: 80 to train on, 20 held out."""
    rows = [{"prompt": f"{first}{last}>", "digit": last} for first, last in itertools.product("0123456789", repeat=2)]
    random.Random(seed).shuffle(rows)
    return rows[_NUM_HELD_OUT:], rows[:_NUM_HELD_OUT]


def make_model(folder: Path, seed: int = 0) -> int:
    """Write model and tokenizer as a Hugging Face checkpoint.

    Returns:
        The number of parameters.
    """
    model = make_llama(VOCABULARY, end=END, pad=PAD, seed=seed)
    model.save_pretrained(folder)
    _make_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_llama(vocabulary: Mapping[str, int], *, end: str, pad: str, seed: int, **settings: Any) -> Any:
    """A Llama of two layers and 64 dimensions, fresh from the seed, for a vocabulary of words.

    Args:
        vocabulary: word to id.
        end: the word that ends an answer.
        pad: the word that fills rows.
        seed: of the weights.
        settings: more of `transformers.LlamaConfig`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[end],
        pad_token_id=vocabulary[pad],
        **settings,
    )
    return LlamaForCausalLM(config)


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def write_jsonl(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def main() -> None:
    """Make everything in the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Make the tiny recipe's model and data.")
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and split")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    num_parameters = make_model(arguments.folder, arguments.seed)
    train, held_out = make_rows(arguments.seed)
    write_jsonl(arguments.folder / "train.jsonl", train)
    write_jsonl(arguments.folder / "heldout.jsonl", held_out)
    print(f"{arguments.folder}: {num_parameters} parameters, {len(train)} prompts, {len(held_out)} held out")


if __name__ == "__main__":
    main()
