"""How many bytes the parts of a run take (pure). Estimates: what a formula leaves out is named where it stands.

Sources: the shares of weights, gradients and optimizer state over ranks are those of ZeRO (Rajbhandari et al. 2020, section
5), with float32 Adam; what a layer keeps for the backward pass is counted from a gated transformer layer under an attention
that keeps no matrix of scores, as Korthikanti et al. 2022 (section 4) count theirs.
"""

import math
from dataclasses import dataclass

from laminar.dry_run.architecture import Architecture

FLOAT = 4
BUCKET_NUMBERS = 500_000_000
"""DeepSpeed's `reduce_bucket_size`: gradients on their way to the rank that sums them."""
LOGITS_BYTES = 256 * 1024**2
"""Logits that `trainer.policy` makes at once, and what stands beside them: scaled, and their log-softmax."""
NUM_LOGITS = 3


@dataclass(frozen=True, slots=True)
class TrainedBytes:
    """What one trained model takes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def trained_bytes(num_parameters: int, number_bytes: int, zero_stage: int, num_ranks: int) -> TrainedBytes:
    """Weights, gradients and Adam's state of one model on one rank.

    Gradients are summed in float32. Stage 0 in float32 updates the weights in place; every other case keeps float32 weights
    of its own beside Adam's two moments. bfloat16 needs stage 1 at least, and takes it.

    Args:
        num_parameters: of the model.
        number_bytes: of a weight in training, 2 or 4.
        zero_stage: `trainer.deepspeed.zero_stage`.
        num_ranks: over which is split what the stage splits.
    """
    is_half, n = number_bytes < FLOAT, num_ranks
    stage = max(zero_stage, int(is_half))
    own = _share(num_parameters, n)
    weights = (own if stage >= 3 else num_parameters) * number_bytes
    gradients = (own if stage >= 2 else num_parameters) * FLOAT
    if is_half:  # as the backward pass makes them, before they are summed
        gradients += (min(BUCKET_NUMBERS, num_parameters) if stage >= 2 else num_parameters) * number_bytes
    optimizer = own * 3 * FLOAT if stage else num_parameters * 2 * FLOAT
    return TrainedBytes(weights, gradients, optimizer)


def activation_bytes(architecture: Architecture, num_tokens: int, number_bytes: int, *, checkpointing: bool) -> int:
    """What a forward pass keeps for the backward pass, padding included.

    A layer keeps, a token: its input and the input of its second half, both norms' outputs and their float32 inputs;
    queries, keys, values and what attention gives; gate, up, the activated gate and the product. With checkpointing a layer
    keeps its input alone, and one layer at a time is computed again. (What torch saved for SmolLM2-135M on
    256 tokens, in float32 and in bfloat16, was 0.5 % and 0.7 % more.)
    """
    a = architecture
    attention = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_size
    layer = num_tokens * (number_bytes * (4 * a.hidden_size + attention + 4 * a.ffn_size) + 2 * FLOAT * a.hidden_size)
    if not checkpointing:
        return a.num_layers * layer
    return a.num_layers * num_tokens * a.hidden_size * number_bytes + layer


def logits_bytes(vocabulary_size: int, num_tokens: int) -> int:
    """Logits of one pass in float32, made in chunks, and what is computed from them."""
    return NUM_LOGITS * min(LOGITS_BYTES, num_tokens * vocabulary_size * FLOAT)


def cache_capacity_tokens(device_bytes: float, weight_bytes: int, bytes_per_token: int) -> int:
    """Tokens whose keys and values fit beside the weights."""
    return max(0, math.floor((device_bytes - weight_bytes) / bytes_per_token))


def _share(total: int, parts: int) -> int:
    return math.ceil(total / parts)
