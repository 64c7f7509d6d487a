"""Which `Layout` a model's micro-batches get (DESIGN section 9); a new model is tried on a few tokens first.

Packed rows are told apart by their positions alone, which begin at 0 again with each: flash attention reads them so, and so
does the mask that transformers makes for other attention (which is slow, and has tokens x tokens elements).
"""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from laminar.config.trainer import TrainerConfig
from laminar.errors import ConfigError
from trainer.batches import Layout
from trainer.folding import fold, run_folded
from trainer.model import can_share_prompts
from trainer.ranks import Ranks

logger = logging.getLogger("laminar.trainer.engine")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Relative error of hidden states that rounding may explain."""


def wants_flash(config: TrainerConfig, ranks: Ranks) -> bool:
    """Whether a model is to be loaded with flash attention, where that is installed."""
    return config.pack_rows != "off" and ranks.sequence is None and ranks.device.type == "cuda"


def model_layout(model: PreTrainedModel, config: TrainerConfig, ranks: Ranks, *, is_partitioned: bool = False) -> Layout:
    """The best layout that a model can compute under these settings.

    Args:
        model: on its device, its parameters whole.
        config: the trainer's settings.
        ranks: the joined ranks; where they share a row, a rank has no prompt of its own.
        is_partitioned: ZeRO 3 will split it: all ranks must pass through it equally often, so nothing is folded.

    Raises:
        ConfigError: `pack_rows` is `on`, and the model mixes rows that are packed.
    """
    if packs_rows(model, config, ranks):
        return Layout.PACKED
    if not config.share_prompts or ranks.sequence is not None:
        return Layout.PADDED
    if config.gradient_checkpointing:
        logger.warning("trainer.share_prompts is off: gradient_checkpointing recomputes layers without a key-value cache")
        return Layout.PADDED
    if not can_share_prompts(model):
        logger.warning("trainer.share_prompts is off: a model has layers without a plain key-value cache")
        return Layout.PADDED
    is_sdpa = model.config._attn_implementation == "sdpa"  # others take other masks
    return Layout.FOLDED if is_sdpa and not is_partitioned and can_fold(model) else Layout.SHARED


def can_fold(model: PreTrainedModel) -> bool:
    """Whether a model keeps to a mask that it is given; if not, the log says why prompts take a pass of their own."""
    try:
        error, limit = folding_error(model), TOLERANCE[model.dtype]
    except (RuntimeError, ValueError, TypeError, IndexError) as problem:  # it makes something else of a mask (N, N)
        logger.warning("prompts are shared, but not folded: the model takes no mask of its tokens: %s", problem)
        return False
    if error > limit:
        text = "prompts are shared, but not folded: they come out otherwise than alone (relative error %.3g; rounding: %g)"
        logger.warning(text, error, limit)
    return error <= limit


def common_layout(policy: Layout, others: Iterable[Layout]) -> Layout:
    """The layout of micro-batches that the policy and other models compute: prompts are shared if all of them can."""
    if not policy.shares_prompts:
        return policy
    layouts = {policy, *others}
    if layouts == {Layout.FOLDED}:
        return Layout.FOLDED
    return Layout.SHARED if all(layout.shares_prompts for layout in layouts) else Layout.PADDED


def packs_rows(model: PreTrainedModel, config: TrainerConfig, ranks: Ranks) -> bool:
    """Whether the rows that a model computes are packed; `auto` asks for flash attention.

    Raises:
        ConfigError: it is `on`, and the model mixes rows that are packed.
    """
    if config.pack_rows == "off" or ranks.sequence is not None:
        return False
    if config.pack_rows == "auto" and not uses_flash(model):
        return False
    error, limit = packing_error(model), TOLERANCE[model.dtype]
    if error <= limit:
        return True
    text = f"packed rows come out otherwise than alone (relative error {error:.3g}; rounding explains {limit:g})"
    if config.pack_rows == "on":
        raise ConfigError(f'{text}: the model does not tell them apart by position; set trainer.pack_rows = "off"')
    logger.warning("trainer.pack_rows is off: %s", text)
    return False


def uses_flash(model: PreTrainedModel) -> bool:
    """Whether a model computes attention by flash attention."""
    return str(model.config._attn_implementation).startswith("flash_attention")


@torch.no_grad()
def packing_error(model: PreTrainedModel) -> float:
    """Relative error of a model's hidden states for two short rows, packed against one by one."""
    trunk, device = model.base_model, next(model.parameters()).device
    ids_N = torch.arange(1, 13, device=device) % model.config.vocab_size
    rows = ids_N.split([5, 7])
    alone_NH = torch.cat([trunk(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows])
    places_N = torch.cat([torch.arange(len(row), device=device) for row in rows])
    packed_NH = trunk(input_ids=ids_N[None], position_ids=places_N[None], use_cache=False).last_hidden_state[0]
    return float((packed_NH - alone_NH).double().norm() / alone_NH.double().norm())


@torch.no_grad()
def folding_error(model: PreTrainedModel) -> float:
    """Relative error of a model's hidden states for two responses to each of two prompts, folded against one by one.

    Two of the responses begin alike.
    """
    trunk, device = model.base_model, next(model.parameters()).device
    prompts = (torch.arange(5, 8, device=device), torch.arange(9, 14, device=device))
    responses = torch.tensor([[1, 2, 3], [1, 5, 6], [7, 8, 9], [10, 11, 12]], device=device)
    alone = [
        trunk(input_ids=torch.cat([prompts[row // 2], response[:-1]])[None] % model.config.vocab_size, use_cache=False)
        for row, response in enumerate(responses)
    ]
    alone_BTH = torch.stack([output.last_hidden_state[0, -len(responses[0]) :] for output in alone])
    folded = fold(
        responses % model.config.vocab_size,
        torch.ones_like(responses, dtype=torch.bool),
        torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True) % model.config.vocab_size,
        torch.tensor([len(prompt) for prompt in prompts], device=device),
        torch.arange(len(responses), device=device) // 2,
    )
    assert folded is not None
    folded_BTH = run_folded(trunk, folded)[folded.before]
    return float((folded_BTH - alone_BTH).double().norm() / alone_BTH.double().norm())


def packed_places(scored_BU: Tensor) -> tuple[Tensor, Tensor]:
    """Which places of padded rows are computed, (B, U) bool, and their positions, (N,); at least one of each row.

    Args:
        scored_BU: bool, the places that something is asked about; what follows a row's last one is padding.
    """
    places_U = torch.arange(scored_BU.shape[1], device=scored_BU.device)
    last_B1 = (scored_BU * places_U).amax(dim=1, keepdim=True)
    kept_BU = places_U <= last_B1
    return kept_BU, places_U.expand_as(kept_BU)[kept_BU]
