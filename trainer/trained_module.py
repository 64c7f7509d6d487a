"""A module with its AdamW under DeepSpeed, on one rank.

Invariants:
- a gradient is the sum of what was given to `backward` by all micro-batches on all ranks: DeepSpeed's division by ranks and
  accumulation steps is undone, so the caller's loss denominator is the only one;
- an update with a non-finite gradient norm is not applied, on any rank: weights and optimizer state stay as they were;
- the learning rate is an argument of the update.

It does not know what the module computes.
"""

import contextlib
import io
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laminar.config.trainer import TrainerConfig
from laminar.errors import ConfigError
from trainer.norm_gate import NormGate
from trainer.ranks import Ranks

logger = logging.getLogger("laminar.trainer.engine")


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
        self.is_replicated = config.deepspeed.zero_stage == 0 and dtype != torch.bfloat16
        self._engine = _initialize_deepspeed(module, dtype, self._adam, config, self.is_replicated)
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
        norm = float(torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._config.max_grad_norm))
        if not math.isfinite(norm) or norm > largest_norm:
            self._engine.zero_grad()
            return Update(False, norm)
        self._engine.step()
        return Update(True, norm)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This rank's optimizer state by name: Adam's moments and step, and the float32 weights if they are apart."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._optimized():
            if not self.is_replicated:
                tensors[f"weights.{name}"] = parameter.detach()
            tensors |= {f"{key}.{name}": value for key, value in self._adam.state[parameter].items()}
        return tensors

    @torch.no_grad()
    def load_optimizer(self, optimizer: Mapping[str, Tensor]) -> None:
        """Restore what `optimizer_tensors` gave."""
        for name, parameter in self._optimized():
            state = {key.removesuffix(f".{name}"): value for key, value in optimizer.items() if key.endswith(f".{name}")}
            weights = state.pop("weights", None)
            if weights is not None:
                parameter.copy_(weights)
            self._adam.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in state.items()}

    def _optimized(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What Adam updates, by position: the parameters, or this rank's flat float32 share of them."""
        for place, group in enumerate(self._adam.param_groups):
            yield from ((f"{place}.{index}", parameter) for index, parameter in enumerate(group["params"]))


@torch.no_grad()
def load_tensors(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], origin: str) -> None:
    """Copy saved tensors into a module's own.

    Raises:
        ConfigError: if a name or a shape is another model's.
    """
    for name in sorted(own.keys() | saved.keys()):
        if name not in own or name not in saved or own[name].shape != saved[name].shape:
            raise ConfigError(f"the checkpoint is of another model than {origin}: tensor {name} differs")
        own[name].copy_(saved[name])


def _initialize_deepspeed(
    module: nn.Module, dtype: torch.dtype, adam: torch.optim.Optimizer, config: TrainerConfig, is_plain: bool
) -> Any:
    deepspeed = _import_deepspeed()
    is_bfloat16 = dtype == torch.bfloat16
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if is_plain else config.max_grad_norm,
        # Under bfloat16, stage 0 would keep gradients in bfloat16; stage 1 has float32 sums and weights.
        "zero_optimization": {"stage": max(config.deepspeed.zero_stage, int(is_bfloat16)), "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": is_bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }
    with contextlib.redirect_stdout(io.StringIO()) as chatter:
        engine, *_ = deepspeed.initialize(model=module, optimizer=adam, config=settings, dist_init_required=False)
    logger.debug("DeepSpeed says: %s", chatter.getvalue())
    return engine


def _import_deepspeed() -> Any:
    """Import DeepSpeed quietly, and without its shared-memory collectives.

    Those are compiled at first use, for 40 s, under a lock file that a kill leaves behind, on which every later run hangs;
    and their shared memory is named by user and port, so two runs on one host could meet. gloo does the same work.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    chatter = logging.getLogger("DeepSpeed")
    chatter.handlers.clear()
    chatter.setLevel(logging.WARNING)
    chatter.propagate = True
    return deepspeed
