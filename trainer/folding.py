"""The rows of a micro-batch as one prefix tree: tokens that rows begin with alike are computed once, prompts and responses.

The tree lies in one row, in which a token sees its path from the root by a mask: one pass, no padding, and the values and
gradients of rows alone. Attention computes tokens x tokens, so it is for few tokens.
Shapes: B rows, T response tokens, P distinct prompts, N tokens of the tree, H hidden.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from laminar.types import BoolArray
from trainer.batches import MOST_FOLDED_TOKENS

ROOT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """One row that stands for a micro-batch.

    Attributes:
        token_ids: (N,) int64, each after its parent.
        places: (N,) int64, position of each token in the rows that it belongs to.
        sees: (N, N) bool: which tokens a token attends to.
        before: (B, T) int64: the token after which a response's token comes; any at places that nothing is asked about.
    """

    token_ids: Tensor
    places: Tensor
    sees: Tensor
    before: Tensor


class _Tree:
    """Tokens by their parent and id; a token's number is how many came before it."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], int] = {}

    def walk(self, number: int, token_ids: Iterable[int]) -> list[int]:
        """Numbers of the tokens that follow a token, which are made where there are none."""
        path = []
        for token_id in token_ids:
            number = self.numbers.setdefault((number, token_id), len(self.numbers))
            path.append(number)
        return path

    def sees(self) -> BoolArray:
        """(N, N): each token sees its parent, what that sees, and itself."""
        sees_NN = np.eye(len(self.numbers), dtype=np.bool_)
        for (parent, _), number in self.numbers.items():
            if parent != ROOT:
                sees_NN[number] |= sees_NN[parent]
        return sees_NN


def fold(
    token_ids_BT: Tensor, mask_BT: Tensor, prompt_ids_PT: Tensor, lengths_P: Tensor, prompt_of_row_B: Tensor
) -> Folded | None:
    """Fold a micro-batch; None if its tree has more than `MOST_FOLDED_TOKENS`.

    Args:
        token_ids_BT: int64, what follows the prompts, padded on the right.
        mask_BT: bool, the places that something is asked about; a row's last one and what follows it are not computed.
        prompt_ids_PT: distinct prompts, padded on the right.
        lengths_P: their lengths.
        prompt_of_row_B: which prompt each row follows.
    """
    device, width = token_ids_BT.device, token_ids_BT.shape[1]
    num_given_B = (mask_BT * torch.arange(width, device=device)).amax(dim=1)
    tree = _Tree()
    lengths = lengths_P.tolist()
    ends = [tree.walk(ROOT, ids[:length])[-1] for ids, length in zip(prompt_ids_PT.tolist(), lengths, strict=True)]
    before = []
    for ids, num_given, prompt in zip(token_ids_BT.tolist(), num_given_B.tolist(), prompt_of_row_B.tolist(), strict=True):
        path = [ends[prompt], *tree.walk(ends[prompt], ids[:num_given])]
        before.append(path + [0] * (width - len(path)))
        if len(tree.numbers) > MOST_FOLDED_TOKENS:
            return None
    sees_NN = torch.from_numpy(tree.sees()).to(device)
    return Folded(
        token_ids=torch.tensor([token_id for _, token_id in tree.numbers], device=device),
        places=sees_NN.sum(dim=1) - 1,
        sees=sees_NN,
        before=torch.tensor(before, device=device),
    )


def run_folded(trunk: nn.Module, folded: Folded) -> Tensor:
    """(N, H) hidden states of the tree's tokens."""
    hidden_NH: Tensor = trunk(
        input_ids=folded.token_ids[None],
        position_ids=folded.places[None],
        attention_mask=folded.sees[None, None],
        use_cache=False,
    ).last_hidden_state[0]
    return hidden_NH
