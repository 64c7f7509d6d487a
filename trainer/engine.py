"""One rank's model, optimizer and DeepSpeed engine.

Invariants:
- a gradient is the sum of what was given to `backward` by all micro-batches on all ranks: DeepSpeed's division by ranks and
  accumulation steps is undone, so the caller's loss denominator is the only one;
- an update with a non-finite gradient norm is not applied, on any rank: weights and optimizer state stay as they were;
- the learning rate is an argument of the update.

It does not know algorithms, batches or steps.
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
from torch import Tensor

from laminar.config.root import LaminarConfig
from laminar.config.trainer import TrainerConfig
from laminar.errors import ConfigError, InvariantError
from trainer.model import can_share_prompts, load_model
from trainer.packing import PackedRows
from trainer.policy import Policy
from trainer.ranks import Ranks
from trainer.reference import Reference

logger = logging.getLogger("laminar.trainer.engine")


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer update.

    Attributes:
        applied: false if the gradient was not finite.
        grad_norm: before clipping.
    """

    applied: bool
    grad_norm: float


class TrainerEngine:
    """The policy under DeepSpeed.

    Args:
        config: the run's settings; `model.path` must be a folder.
        ranks: the joined ranks; all construct their engine together.
        needs: what the algorithm asks for; decides whether a reference is loaded.

    Raises:
        ConfigError: if the model cannot be loaded or trained.
    """

    def __init__(self, config: LaminarConfig, ranks: Ranks, needs: frozenset[str] = frozenset()) -> None:
        torch.set_num_threads(config.trainer.num_threads)
        torch.manual_seed(config.run.seed + ranks.rank)
        self.config = config
        self.ranks = ranks
        self.model = load_model(config.model, gradient_checkpointing=config.trainer.gradient_checkpointing).to(ranks.device)
        self._reference = Reference(config, ranks, self.model.config.vocab_size) if "ref_logprobs" in needs else None
        self.share_prompts = self._decide_sharing()
        self._adam = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=config.trainer.learning_rate,
            betas=(config.trainer.adam_beta1, config.trainer.adam_beta2),
            eps=config.trainer.adam_epsilon,
            weight_decay=config.trainer.weight_decay,
            fused=True,
        )
        self._is_plain = config.trainer.deepspeed.zero_stage == 0 and self.model.dtype != torch.bfloat16
        self._engine = _initialize_deepspeed(Policy(self.model), self._adam, config.trainer, self._is_plain)

    def forward(self, batch: PackedRows, *, is_last: bool, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Score a micro-batch; all ranks call `forward` and `backward` equally often before an update.

        Args:
            batch: the rows.
            is_last: whether the update follows this micro-batch.
            entropy_gradient: whether entropies carry a gradient too.

        Returns:
            Log-probs with gradient and entropies, (B, T) each, 0 where nothing is trained.
        """
        self._engine.set_gradient_accumulation_boundary(is_last)
        logprobs_BT, entropy_BT = self._engine(*batch.model_inputs(), entropy_gradient=entropy_gradient)
        return logprobs_BT, entropy_BT

    @torch.no_grad()
    def score(self, batch: PackedRows) -> Tensor:
        """Log-probs of a micro-batch under the weights as they are, (B, T), without gradient; 0 where nothing is trained.

        All ranks call it equally often.
        """
        logprobs_BT: Tensor = self._engine(*batch.model_inputs())[0]
        return logprobs_BT

    @property
    def reference(self) -> Reference:
        """The frozen reference; a context manager, on the device inside."""
        if self._reference is None:
            raise InvariantError("the engine was made for an algorithm that needs no reference")
        return self._reference

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradient; after the mini-batch's last micro-batch, ranks add up theirs."""
        self._engine.backward(loss * self.ranks.world_size)

    def update(self, learning_rate: float) -> Update:
        """Clip and apply the gradient gathered since the last update; nothing is applied if its norm is not finite."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        norm = math.nan
        if self._is_plain:  # DeepSpeed's other optimizers check and clip by themselves
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.max_grad_norm))
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return Update(False, norm)
        self._engine.step()
        norm = norm if self._is_plain else float(self._engine.get_global_grad_norm())
        return Update(math.isfinite(norm), norm)

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The full model under its Hugging Face names, tied parameters once, in the training dtype; not copies."""
        yield from self.model.named_parameters()
        persistent = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in persistent)

    @property
    def optimizer_is_replicated(self) -> bool:
        """Whether every rank holds the whole optimizer state."""
        return self._is_plain

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """This rank's optimizer state by name: Adam's moments and step, and the float32 weights if they are apart."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._optimized():
            if not self._is_plain:
                tensors[f"weights.{name}"] = parameter.detach()
            tensors |= {f"{key}.{name}": value for key, value in self._adam.state[parameter].items()}
        return tensors

    @torch.no_grad()
    def load_state(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` and `optimizer_tensors` gave.

        Raises:
            ConfigError: if a name or a shape is another model's.
        """
        own = dict(self.state_tensors())
        for name in sorted(own.keys() | model.keys()):
            if name not in own or name not in model or own[name].shape != model[name].shape:
                raise ConfigError(f"the checkpoint is of another model than {self.config.model.path}: tensor {name} differs")
            own[name].copy_(model[name])
        for name, parameter in self._optimized():
            state = {key.removesuffix(f".{name}"): value for key, value in optimizer.items() if key.endswith(f".{name}")}
            weights = state.pop("weights", None)
            if weights is not None:
                parameter.copy_(weights)
            self._adam.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in state.items()}

    def _optimized(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """What Adam updates, by position: the parameters, or this rank's flat float32 share of them."""
        for place, group in enumerate(self._adam.param_groups):
            yield from ((f"{place}.{index}", parameter) for index, parameter in enumerate(group["params"]))

    def _decide_sharing(self) -> bool:
        trainer = self.config.trainer
        if trainer.share_prompts and trainer.gradient_checkpointing:
            logger.warning(
                "trainer.share_prompts is off: gradient_checkpointing recomputes layers without a key-value cache"
            )
            return False
        is_able = can_share_prompts(self.model) and (self._reference is None or self._reference.can_share_prompts)
        if trainer.share_prompts and not is_able:
            logger.warning("trainer.share_prompts is off: a model has layers without a plain key-value cache")
            return False
        return trainer.share_prompts


def _initialize_deepspeed(policy: Policy, adam: torch.optim.Optimizer, config: TrainerConfig, is_plain: bool) -> Any:
    deepspeed = _import_deepspeed()
    is_bfloat16 = policy.model.dtype == torch.bfloat16
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
        engine, *_ = deepspeed.initialize(model=policy, optimizer=adam, config=settings, dist_init_required=False)
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
