"""The attention of TRL's packed rows on a CPU, in the place of its CUDA kernel (`benchmarks.trl_async_side`).

A row is a tree of token segments laid end to end; a segment's tokens see the path from the tree's root to themselves.
"""

from typing import Any

import torch


def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **tree: Any) -> tuple[torch.Tensor, None]:
    """TRL's tree attention on a CPU: (1, heads, T, D) queries; a segment of a row sees the path from its root to itself."""
    allowed = visible(query.shape[2], tree["tree_kv_index"], tree["tree_cu_seqlens_q"], tree["tree_cu_seqlens_k"])
    answer = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=tree.get("scaling"), enable_gqa=True
    )
    return answer.transpose(1, 2).contiguous(), None


def visible(num_tokens: int, kv_index: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor) -> torch.Tensor:
    """(T, T) bool: whom each packed token attends to.

    Args:
        num_tokens: T.
        kv_index: (K,) packed positions of all segments' paths, laid end to end.
        ends_q: (S + 1,) where segments begin and end in the row.
        ends_k: (S + 1,) where their paths begin and end in `kv_index`.
    """
    allowed = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for segment in range(len(ends_q) - 1):
        first, end = int(ends_q[segment]), int(ends_q[segment + 1])
        path = kv_index[int(ends_k[segment]) : int(ends_k[segment + 1])]
        before = len(path) - (end - first)
        for place in range(first, end):
            allowed[place, path[: before + place - first + 1]] = True
    return allowed
