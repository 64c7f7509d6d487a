"""A tiny random Llama checkpoint, written in milliseconds: for tests of anything that needs a model but no sense.

It is a plain HF folder (`config.json`, `generation_config.json`, `model.safetensors`, no tokenizer). This module knows no
engine.
"""

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


def tiny_config(
    *, tied: bool = True, vocabulary_size: int = 128, end_ids: tuple[int, ...] = (2,)
) -> transformers.LlamaConfig:
    """Two layers, grouped heads, float32."""
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocabulary_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=list(end_ids),
        pad_token_id=end_ids[0],
        dtype=torch.float32,
    )


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    vocabulary_size: int = 128,
    end_ids: tuple[int, ...] = (2,),
    scale: float = 1.0,
) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        folder: made if it is not there.
        seed: of the random weights.
        tied: whether output head and embedding are one tensor.
        vocabulary_size: number of tokens.
        end_ids: end-of-sequence ids, in `generation_config.json` too.
        scale: factor on all weights, to make another version of the same model (cases D14).
    """
    config = tiny_config(tied=tied, vocabulary_size=vocabulary_size, end_ids=end_ids)
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * 0.25
            parameter.copy_((1 + noise if name.endswith("norm.weight") else noise) * scale)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    transformers.GenerationConfig(bos_token_id=1, eos_token_id=list(end_ids), pad_token_id=end_ids[0]).save_pretrained(
        folder
    )
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
