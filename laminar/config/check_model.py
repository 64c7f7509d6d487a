"""Judge lengths, splits and adapters by what the model's own files say; nothing is said of a model that is not here.

Reads its `config.json` and the names of its weights.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laminar.config.root import LaminarConfig
from laminar.config.sizes import read_tensors


def model_faults(config: LaminarConfig) -> Iterator[str]:
    """One sentence for every setting that this model cannot take."""
    model = _read_config(Path(config.model.path))
    yield from _length_faults(config, model.get("max_position_embeddings"))
    size, heads = config.trainer.sequence_parallel_size, model.get("num_attention_heads")
    if isinstance(heads, int) and heads % size and config.trainer.kind != "emulated":
        yield (
            f"`trainer.sequence_parallel_size` is {size}, which does not divide the model's {heads} attention heads: use "
            "one that does"
        )


def adapter_notes(config: LaminarConfig) -> Iterator[str]:
    """Targets of adapters that no weight of the model is named by; a model may rename its weights when it is loaded."""
    lora = config.trainer.lora
    if not (lora.rank and lora.targets):
        return
    layers = [name.removesuffix(".weight") for name, _ in read_tensors(Path(config.model.path))]
    ends = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
    for target in lora.targets:
        if layers and not any(f".{layer}".endswith(f".{target}") for layer in layers):
            yield f'`trainer.lora.targets` has "{target}", but no weight of the model is named so; they end in {ends}'


def _length_faults(config: LaminarConfig, positions: Any) -> Iterator[str]:
    """Answers for which the model's positions leave no prompt; engines of ours refuse them, all of them."""
    if not isinstance(positions, int) or config.rollout.engine.kind not in ("torch", "emulated"):
        return
    lengths = {"rollout.max_new_tokens": config.rollout.max_new_tokens}
    if config.eval.path and config.eval.max_new_tokens is not None:
        lengths["eval.max_new_tokens"] = config.eval.max_new_tokens
    for setting, length in lengths.items():
        if length >= positions:
            yield (
                f"`{setting}` is {length}, but the model has {positions} positions (`max_position_embeddings`) for prompt "
                "and answer together: lower it"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    """What is known of the language model; empty if there is no such file."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    inner = config.get("text_config", config) if isinstance(config, dict) else {}
    return inner if isinstance(inner, dict) else {}
