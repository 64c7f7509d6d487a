"""How the rows of a micro-batch lie: padded to the longest, or packed one behind the other (DESIGN section 9).

Packed rows are told apart by their positions alone, which begin at 0 again with each: flash attention reads them so, and so
does the mask that transformers makes for other attention (which is slow, and has tokens x tokens elements).
"""

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from laminar.config.trainer import TrainerConfig
from laminar.errors import ConfigError
from trainer.ranks import Ranks

logger = logging.getLogger("laminar.trainer.engine")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Relative error of hidden states that rounding may explain."""


def wants_flash(config: TrainerConfig, ranks: Ranks) -> bool:
    """Whether a model is to be loaded with flash attention, where that is installed."""
    return config.pack_rows != "off" and ranks.sequence is None and ranks.device.type == "cuda"


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


def packed_places(scored_BU: Tensor) -> tuple[Tensor, Tensor]:
    """Which places of padded rows are computed, (B, U) bool, and their positions, (N,); at least one of each row.

    Args:
        scored_BU: bool, the places that something is asked about; what follows a row's last one is padding.
    """
    places_U = torch.arange(scored_BU.shape[1], device=scored_BU.device)
    last_B1 = (scored_BU * places_U).amax(dim=1, keepdim=True)
    kept_BU = places_U <= last_B1
    return kept_BU, places_U.expand_as(kept_BU)[kept_BU]
