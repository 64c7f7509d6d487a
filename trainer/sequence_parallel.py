"""Long rows over several ranks: each computes a stretch of every row, and attention swaps stretches for heads (Ulysses).

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509, section 3.1): before attention an all-to-all gives a rank whole rows
for its share of the heads, after it another gives back its stretch for all heads. All else is done token by token.

The ranks of a group hold the same rows and compute the same loss, so a rank's gradient is that of its stretch alone, and
their sum is that of the whole. Written here and not taken from DeepSpeed's, which keeps its groups in globals and wants the
shape of the batch beforehand.

Shapes: B rows, H heads, T tokens of a row, S tokens of a stretch, D numbers a head, R ranks of a group.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from laminar.errors import ConfigError
from trainer.model import can_share_prompts
from trainer.ranks import SequenceGroup

_NAME = "laminar_ulysses"


def split_attention(model: PreTrainedModel, group: SequenceGroup) -> None:
    """Let a model's attention see whole rows while this rank computes a stretch of them.

    Raises:
        ConfigError: if its attention is of a kind, or has a number of heads, that cannot be split so.
    """
    size, heads = group.size, model.config.num_attention_heads
    if heads % size:
        raise ConfigError(
            f"`trainer.sequence_parallel_size` is {size}, which does not divide the model's {heads} attention heads: use "
            "one that does"
        )
    takes_positions = "position_ids" in inspect.signature(type(model.base_model).forward).parameters
    if not takes_positions or not can_share_prompts(model):
        raise ConfigError(
            f"`trainer.sequence_parallel_size` is {size}, but the model has layers without plain attention to all earlier "
            "tokens: set it to 1"
        )
    AttentionInterface.register(_NAME, _attend)
    model.config._attn_implementation = _NAME
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.sequence_group = group


def stretch_of(tensor_BT: Tensor, group: SequenceGroup) -> Tensor:
    """This rank's stretch of rows, (B, S); the last ones are padded with zeros."""
    width = -(-tensor_BT.shape[1] // group.size)
    padded_BT = functional.pad(tensor_BT, (0, width * group.size - tensor_BT.shape[1]))
    return padded_BT[:, group.place * width : (group.place + 1) * width].contiguous()


def join_stretches(values_BS: Tensor, group: SequenceGroup) -> Tensor:
    """The values of whole rows, (B, R * S), from those of all stretches.

    Every rank of the group must make the same loss of them: each takes the gradient of its own stretch, nothing is sent.
    """
    joined_BT: Tensor = _Join.apply(values_BS, group)
    return joined_BT


def _attend(
    module: Any,
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Causal attention over whole rows; arguments and (B, S, H, D) result as transformers has them."""
    if attention_mask is not None or settings.get("softcap") is not None or settings.get("sliding_window") is not None:
        raise ConfigError("`trainer.sequence_parallel_size` above 1 needs plain causal attention: set it to 1")
    group: SequenceGroup = module.sequence_group
    if key_BHSD.shape[1] % group.size:  # fewer key heads than ranks: each query head takes its own along
        repeats = query_BHSD.shape[1] // key_BHSD.shape[1]
        key_BHSD, value_BHSD = key_BHSD.repeat_interleave(repeats, 1), value_BHSD.repeat_interleave(repeats, 1)
    query, key, value = (_tokens_for_heads(states, group) for states in (query_BHSD, key_BHSD, value_BHSD))
    is_grouped = query.shape[1] != key.shape[1]
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped)
    return _heads_for_tokens(output, group).transpose(1, 2), None


def _tokens_for_heads(states_BHSD: Tensor, group: SequenceGroup) -> Tensor:
    """(B, H, S, D) of this stretch -> (B, H / R, T, D) of this rank's heads."""
    rows, heads, stretch, width = states_BHSD.shape
    outgoing = states_BHSD.view(rows, group.size, heads // group.size, stretch, width).transpose(0, 1).contiguous()
    incoming: Tensor = _Exchange.apply(outgoing, group)
    return incoming.permute(1, 2, 0, 3, 4).reshape(rows, heads // group.size, group.size * stretch, width)


def _heads_for_tokens(states_BHTD: Tensor, group: SequenceGroup) -> Tensor:
    """(B, H / R, T, D) of this rank's heads -> (B, H, S, D) of this stretch."""
    rows, heads, tokens, width = states_BHTD.shape
    outgoing = states_BHTD.reshape(rows, heads, group.size, tokens // group.size, width).permute(2, 0, 1, 3, 4).contiguous()
    incoming: Tensor = _Exchange.apply(outgoing, group)
    return incoming.transpose(0, 1).reshape(rows, group.size * heads, tokens // group.size, width)


class _Exchange(torch.autograd.Function):
    """The slice i of a tensor goes to rank i of the group; what comes from rank i is slice i of the result."""

    @staticmethod
    def forward(context: Any, outgoing: Tensor, group: SequenceGroup) -> Tensor:
        """Send and receive."""
        context.group = group
        return _exchange(outgoing, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Send the gradients back where their values came from."""
        return _exchange(gradients[0].contiguous(), context.group), None


class _Join(torch.autograd.Function):
    """See `join_stretches`."""

    @staticmethod
    def forward(context: Any, values_BS: Tensor, group: SequenceGroup) -> Tensor:
        """Gather."""
        context.place, context.width = group.place, values_BS.shape[1]
        parts = [torch.empty_like(values_BS) for _ in range(group.size)]
        dist.all_gather(parts, values_BS.contiguous(), group=group.group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The own stretch of the gradient."""
        start = context.place * context.width
        return gradients[0][:, start : start + context.width].contiguous(), None


def _exchange(outgoing: Tensor, group: SequenceGroup) -> Tensor:
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group.group)
    return incoming
