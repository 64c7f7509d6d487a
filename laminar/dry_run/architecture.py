"""The sizes of a model that memory depends on, from its `config.json`. Imports no torch; does not know how it is used."""

import json
import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer with gated feed-forward layers.

    Attributes:
        ffn_size: width of the feed-forward layers; of a mixture of experts, of those that one token passes.
        is_tied: whether the output head is the token embedding.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocabulary_size: int
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """Of a dense model without biases: embeddings, attention, gated feed-forward, norms."""
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        embeddings = self.vocabulary_size * self.hidden_size * (1 if self.is_tied else 2)
        return embeddings + self.num_layers * layer + self.hidden_size

    def cache_bytes_per_token(self, number_bytes: int, num_parts: int = 1) -> int:
        """Key and value of one token in all layers, on one of the devices over which heads are split."""
        heads = math.ceil(self.num_kv_heads / num_parts)
        return 2 * self.num_layers * heads * self.head_size * number_bytes


def read_architecture(folder: Path) -> Architecture | None:
    """From a Hugging Face folder; None if there is no config, or one that says too little."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    config = config.get("text_config", config)
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        experts = int(config.get("num_experts_per_tok") or 1)
        return Architecture(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden // heads),
            ffn_size=experts * int(config.get("moe_intermediate_size") or config["intermediate_size"]),
            vocabulary_size=int(config["vocab_size"]),
            is_tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError):
        return None


def read_number_bytes(folder: Path, dtype: str) -> int:
    """Bytes of one weight in the type that is trained: `model.dtype`, or the checkpoint's (4 if it does not say)."""
    if dtype == "auto":
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError):
            return 4
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return 2 if dtype in ("bfloat16", "float16") else 4
