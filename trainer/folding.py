"""Prompts and responses of a micro-batch in one row, each token once: a response sees its prompt and itself.

One pass instead of two, and no padding; attention computes tokens x tokens, so it is for few tokens.
Shapes: B rows, T response tokens, P distinct prompts, N folded tokens, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.batches import MOST_FOLDED_TOKENS

NO_ROW = -1
"""The row of a prompt's tokens, which all its rows see."""


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """One row that stands for a micro-batch.

    Attributes:
        token_ids: (N,) int64: the prompts, then what is given of each response.
        places: (N,) int64, position of each token in its own row.
        sees: (N, N) bool: which tokens a token attends to.
        before: (B, T) int64: the token after which a response's token comes; any at places that nothing is asked about.
    """

    token_ids: Tensor
    places: Tensor
    sees: Tensor
    before: Tensor


def fold(
    token_ids_BT: Tensor, mask_BT: Tensor, prompt_ids_PT: Tensor, lengths_P: Tensor, prompt_of_row_B: Tensor
) -> Folded | None:
    """Fold a micro-batch; None if it has more than `MOST_FOLDED_TOKENS`.

    Args:
        token_ids_BT: int64, what follows the prompts, padded on the right.
        mask_BT: bool, the places that something is asked about; what follows a row's last one is not computed.
        prompt_ids_PT: distinct prompts, padded on the right.
        lengths_P: their lengths.
        prompt_of_row_B: which prompt each row follows.
    """
    device, width = token_ids_BT.device, token_ids_BT.shape[1]
    places_T, prompt_places_T = (torch.arange(size, device=device) for size in (width, prompt_ids_PT.shape[1]))
    given_BT = places_T < (mask_BT * places_T).amax(dim=1, keepdim=True)
    given_PT = prompt_places_T < lengths_P[:, None]
    num_prompt_tokens, num_response_tokens = int(given_PT.sum()), int(given_BT.sum())
    if num_prompt_tokens + num_response_tokens > MOST_FOLDED_TOKENS:
        return None
    prompt_of_token_P1, row_B1 = (torch.arange(size, device=device)[:, None] for size in (len(lengths_P), len(mask_BT)))
    places_BT = lengths_P[prompt_of_row_B][:, None] + places_T
    places_N = torch.cat([prompt_places_T.expand_as(given_PT)[given_PT], places_BT[given_BT]])
    prompt_N = torch.cat(
        [prompt_of_token_P1.expand_as(given_PT)[given_PT], prompt_of_row_B[:, None].expand_as(given_BT)[given_BT]]
    )
    row_N = torch.cat([row_B1.new_full((num_prompt_tokens,), NO_ROW), row_B1.expand_as(given_BT)[given_BT]])
    same_NN = (row_N == NO_ROW) | (row_N == row_N[:, None])
    before_BT = torch.zeros_like(token_ids_BT)
    before_BT[:, 0] = (lengths_P.cumsum(0) - 1)[prompt_of_row_B]
    before_BT[:, 1:][given_BT[:, :-1]] = torch.arange(num_response_tokens, device=device) + num_prompt_tokens
    return Folded(
        token_ids=torch.cat([prompt_ids_PT[given_PT], token_ids_BT[given_BT]]),
        places=places_N,
        sees=same_NN & (prompt_N == prompt_N[:, None]) & (places_N <= places_N[:, None]),
        before=before_BT,
    )


def run_folded(trunk: nn.Module, folded: Folded) -> Tensor:
    """(B, T, H) hidden states that predict the responses' tokens."""
    hidden_NH = trunk(
        input_ids=folded.token_ids[None],
        position_ids=folded.places[None],
        attention_mask=folded.sees[None, None],
        use_cache=False,
    ).last_hidden_state[0]
    return hidden_NH.index_select(0, folded.before.flatten()).view(*folded.before.shape, -1)
