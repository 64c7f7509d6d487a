"""A module with its AdamW under DeepSpeed, on one rank.

Invariants:
- a gradient is the sum of what was given to `backward` by all micro-batches on all ranks: DeepSpeed's division by ranks and
  accumulation steps is undone, so the caller's loss denominator is the only one;
- an update with a non-finite gradient norm is not applied, on any rank: weights and optimizer state stay as they were;
- the learning rate is an argument of the update.

It does not know what the module computes.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laminar.config.trainer import TrainerConfig
from trainer.deepspeed_setup import initialize_deepspeed, zero_stage
from trainer.norm_gate import NormGate
from trainer.optimizer_shares import SavedShares, find_shares, named_tensors, restore
from trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer update.

    Attributes:
        applied: false if the gradient was not finite, or its norm above the limit.
        grad_norm: before clipping.
    """

    applied: bool
    grad_norm: float


class TrainedModule:
    """One module and what updates it.

    Args:
        module: on its device; all its parameters are of one type.
        dtype: that type.
        config: the trainer's settings.
        ranks: the joined ranks; all construct it together.

    Attributes:
        is_replicated: whether every rank holds the whole optimizer state.
        is_partitioned: whether a rank holds only its share of the parameters themselves.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, config: TrainerConfig, ranks: Ranks) -> None:
        self._module, self._config, self._ranks = module, config, ranks
        self._adam = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.is_replicated = zero_stage(config, dtype) == 0
        self.is_partitioned = zero_stage(config, dtype) == 3
        if self.is_replicated:  # else DeepSpeed does the same
            claim_memory(self._adam)
        self._engine = initialize_deepspeed(module, dtype, self._adam, config)
        self._is_alone = self.is_replicated and ranks.world_size == 1
        if self._is_alone:  # else DeepSpeed copies every gradient into one buffer and back
            self._engine.enable_backward_allreduce = False
        named, optimizer = list(module.named_parameters()), None if self.is_replicated else self._engine.optimizer
        self._has_finer_weights = dtype != torch.float32  # else the optimizer's weights are the parameters, bit for bit
        self._shares = find_shares(named, optimizer, ranks.rank, ranks.world_size)
        self._gate = None if self.is_replicated else NormGate(self._engine.optimizer)

    def __call__(self, *arguments: Tensor, **settings: bool) -> Any:
        """The module's answer, with gradient unless switched off."""
        return self._engine(*arguments, **settings)

    def set_boundary(self, *, is_last: bool) -> None:
        """Say whether the update follows the next micro-batch."""
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradient; after the mini-batch's last micro-batch, ranks add up theirs."""
        self._engine.backward(loss * self._ranks.world_size)

    def update(self, learning_rate: float, largest_norm: float = math.inf) -> Update:
        """Clip and apply the gradient gathered since the last update; nothing if its norm is not finite or too large."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        if self._gate is not None:  # DeepSpeed's other optimizers check and clip by themselves
            self._gate.limit = largest_norm
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
            return Update(math.isfinite(norm), norm if math.isfinite(norm) else self._gate.norm)
        if self._is_alone:  # what got no gradient, such as an expert that no token reached, ages as it does on several ranks
            for parameter in self._module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        norm = float(torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._config.max_grad_norm))
        if not math.isfinite(norm) or norm > largest_norm:
            self._engine.zero_grad()
            return Update(False, norm)
        self._engine.step()
        return Update(True, norm)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This rank's share of the optimizer state as a checkpoint names it; see `trainer.optimizer_shares`."""
        return named_tensors(self._shares, self._adam.state, weights=self._has_finer_weights)

    def load_optimizer(self, saved: SavedShares) -> None:
        """Restore the optimizer state, whatever ranks and stage had it; the parameters are loaded already.

        Raises:
            ConfigError: if it is of another model.
        """
        restore(self._shares, self._adam.state, saved, weights=not self.is_replicated)


@torch.no_grad()
def claim_memory(adam: torch.optim.AdamW) -> None:
    """Take the memory of the first step now, where it costs nothing: there it takes seconds, and a lack would show late.

    That is Adam's state, as its first update would make it; own copies of weights, which may be mapped from their file until
    they are written; and all gradients once, which a process under `laminar.allocator.KEEP_ALL` keeps room for.
    """
    parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    del gradients
    for parameter in parameters:
        parameter.mul_(1)
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}
