"""The CPU stand-in for TRL's packed attention: what each sample would see alone."""

import torch

from benchmarks.tree_attention import attend, visible

# Two samples of four tokens share the first two: segments [0, 1], [2, 3] and [4, 5] in the row, with their paths.
KV_INDEX = torch.tensor([0, 1, 0, 1, 2, 3, 0, 1, 4, 5])
ENDS_Q = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
ENDS_K = torch.tensor([0, 2, 6, 10], dtype=torch.int32)


def test_a_token_sees_the_path_from_the_root_to_itself():
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]
    assert visible(6, KV_INDEX, ENDS_Q, ENDS_K).int().tolist() == expected


def test_each_sample_attends_as_it_would_alone():
    torch.manual_seed(0)
    query = torch.randn(1, 4, 6, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
    packed, _ = attend(
        None,
        query,
        key,
        value,
        None,
        scaling=0.3,
        tree_kv_index=KV_INDEX,
        tree_cu_seqlens_q=ENDS_Q,
        tree_cu_seqlens_k=ENDS_K,
    )
    for places in ([0, 1, 2, 3], [0, 1, 4, 5]):
        scores = query[0][:, places] @ key[0].repeat_interleave(2, 0)[:, places].transpose(1, 2) * 0.3
        scores = scores.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf)
        alone = scores.softmax(-1) @ value[0].repeat_interleave(2, 0)[:, places]
        torch.testing.assert_close(packed[0, places].transpose(0, 1), alone)
