"""The trunk of a causal model: the hidden states that stand before given tokens, prompts of a group computed once.

Sharing changes neither values nor gradients.
Shapes: B rows, T tokens, P distinct prompts, S states, H hidden.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from trainer.batches import Layout
from trainer.folding import fold, run_folded
from trainer.layout import packed_places
from trainer.ranks import SequenceGroup
from trainer.sequence_parallel import join_stretches, split_attention, stretch_of


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """What stands before the tokens of a micro-batch. U is T - 1 for whole rows, else T; or this rank's stretch of that.

    Attributes:
        states: (S, H) hidden states.
        state_of: (B, U) int64, which of them stands before each token; rows that begin alike may have the same.
        asked: (B, U) bool, the tokens that something is asked about.
        token_ids: (B, U) int64.
    """

    states: Tensor
    state_of: Tensor
    asked: Tensor
    token_ids: Tensor


class Trunk:
    """Calls a model's trunk; the model belongs to the module that uses this.

    Args:
        model: the causal model, or its trunk.
        group: ranks that compute a stretch of each row each; None: this rank computes whole rows.
        is_partitioned: ZeRO 3 splits the model: the ranks gather each layer together, so all must call the same layers in
            the same order, even one that has nothing to compute there.
        layout: which the model can compute; see `trainer.layout`.

    Raises:
        ConfigError: if the model cannot be split so.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        group: SequenceGroup | None = None,
        *,
        is_partitioned: bool = False,
        layout: Layout = Layout.SHARED,
    ) -> None:
        self._model, self._group, self._is_partitioned, self._layout = model, group, is_partitioned, layout
        if group is not None:
            split_attention(model, group)
        parameters = inspect.signature(type(model.base_model).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def before(
        self,
        token_ids_BT: Tensor,
        mask_BT: Tensor,
        prompt_ids_PT: Tensor | None = None,
        prompt_lengths_P: Tensor | None = None,
        prompt_of_row_B: Tensor | None = None,
    ) -> Before:
        """Hidden states before tokens.

        Args:
            token_ids_BT: int64, padded on the right; whole rows, or what follows the prompt if prompts are given.
            mask_BT: bool; never the first place of a whole row.
            prompt_ids_PT: distinct prompts, computed once each.
            prompt_lengths_P: their lengths.
            prompt_of_row_B: which prompt each row follows.
        """
        if self._group is not None:
            return self._of_stretch(token_ids_BT, mask_BT, self._group)
        if prompt_ids_PT is None:
            given_BU, asked_BU, targets_BU = token_ids_BT[:, :-1], mask_BT[:, 1:], token_ids_BT[:, 1:]
            if self._layout is Layout.PACKED:
                return _one_each(self._run_packed(given_BU, asked_BU), asked_BU, targets_BU)
            return _one_each(self._run(given_BU).last_hidden_state, asked_BU, targets_BU)
        assert prompt_lengths_P is not None
        assert prompt_of_row_B is not None
        prompts = (prompt_ids_PT, prompt_lengths_P, prompt_of_row_B)
        if self._layout is Layout.FOLDED and (folded := fold(token_ids_BT, mask_BT, *prompts)) is not None:
            return Before(run_folded(self._model.base_model, folded), folded.before, mask_BT, token_ids_BT)
        return _one_each(self._after_prompts(token_ids_BT, *prompts), mask_BT, token_ids_BT)

    def aligned(self, values_BU: Tensor, mask_BT: Tensor) -> Tensor:
        """Values of what `before` gave, as (B, T) of the tokens it was asked about; those of all stretches."""
        if self._group is not None:
            values_BU = join_stretches(values_BU, self._group)[:, : mask_BT.shape[1] - 1]
        return functional.pad(values_BU, (mask_BT.shape[1] - values_BU.shape[1], 0))

    def _run_packed(self, given_BU: Tensor, asked_BU: Tensor) -> Tensor:
        """(B, U, H) hidden states, 0 at padding, which is not computed."""
        kept_BU, places_N = packed_places(asked_BU)
        hidden_NH = self._run(given_BU[kept_BU][None], position_ids=places_N[None]).last_hidden_state[0]
        hidden_BUH = hidden_NH.new_zeros(*given_BU.shape, hidden_NH.shape[-1])
        hidden_BUH[kept_BU] = hidden_NH
        return hidden_BUH

    def _of_stretch(self, token_ids_BT: Tensor, mask_BT: Tensor, group: SequenceGroup) -> Before:
        parts = (token_ids_BT[:, :-1], mask_BT[:, 1:], token_ids_BT[:, 1:])
        given_BS, asked_BS, targets_BS = (stretch_of(part, group) for part in parts)
        width = given_BS.shape[1]
        places_S = torch.arange(group.place * width, (group.place + 1) * width, device=given_BS.device)
        hidden_BSH = self._run(given_BS, position_ids=places_S.expand_as(given_BS)).last_hidden_state
        return _one_each(hidden_BSH, asked_BS, targets_BS)

    def _after_prompts(
        self, token_ids_BT: Tensor, prompt_ids_PT: Tensor, lengths_P: Tensor, prompt_of_row_B: Tensor
    ) -> Tensor:
        """Hidden states that predict the tokens after the prompts: the prompt's last, then those of the tokens but the last.

        Keys and values of a prompt are made once and repeated by index to its rows, whose gradients add up there.
        """
        num_rows, width = token_ids_BT.shape
        cache = DynamicCache(config=self._model.config)
        prompt_hidden_PTH = self._run(prompt_ids_PT, cache=cache).last_hidden_state
        last_PH = prompt_hidden_PTH[torch.arange(len(lengths_P), device=lengths_P.device), lengths_P - 1]
        last_B1H = last_PH.index_select(0, prompt_of_row_B)[:, None]
        if width == 1 and not self._is_partitioned:
            return last_B1H
        num_given = max(width - 1, 1)  # with one token a row, it is computed and not looked at
        for layer in cache.layers:
            layer.keys = layer.keys.index_select(0, prompt_of_row_B)
            layer.values = layer.values.index_select(0, prompt_of_row_B)
        lengths_B = lengths_P.index_select(0, prompt_of_row_B)
        places_T = torch.arange(prompt_ids_PT.shape[1], device=lengths_P.device)
        seen_BT = torch.cat(
            [places_T < lengths_B[:, None], lengths_B.new_ones(num_rows, num_given, dtype=torch.bool)], dim=1
        )
        hidden_BTH = self._run(
            token_ids_BT[:, :num_given],
            cache=cache,
            attention_mask=seen_BT.long(),
            position_ids=lengths_B[:, None] + torch.arange(num_given, device=lengths_P.device),
        ).last_hidden_state
        return torch.cat([last_B1H, hidden_BTH[:, : width - 1]], dim=1)

    def _run(self, token_ids_BT: Tensor, cache: DynamicCache | None = None, **arguments: Tensor) -> Any:
        known = {} if cache is None else {self._cache_argument: cache}
        return self._model.base_model(input_ids=token_ids_BT, use_cache=cache is not None, **known, **arguments)


def _one_each(hidden_BUH: Tensor, asked_BU: Tensor, token_ids_BU: Tensor) -> Before:
    state_of_BU = torch.arange(asked_BU.numel(), device=asked_BU.device).view(asked_BU.shape)
    return Before(hidden_BUH.flatten(0, 1), state_of_BU, asked_BU, token_ids_BU)
