"""What one trainer rank, one engine and one machine's relay take, part by part (pure).

A part names the setting that makes it smaller. How the bytes are counted is in `memory`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from laminar.config.check_plugins import algorithm_options
from laminar.config.root import LaminarConfig
from laminar.config.sizes import ModelSize, longest_row_tokens, num_row_shares, num_weight_slots, shares, slot_bytes
from laminar.dry_run.architecture import Architecture
from laminar.dry_run.memory import activation_bytes, logits_bytes, trained_bytes

TRAINER_PROGRAM_BYTES = 600_000_000
ENGINE_PROGRAM_BYTES = 400_000_000
ROLE_PROGRAM_BYTES = 100_000_000
"""Resident memory of a process without model: libraries of a trainer rank, of an engine, of another role."""
CONTEXT_BYTES = 600_000_000
"""A process's own memory on a GPU: driver context, kernels, workspaces."""
SPLIT = "raise trainer.deepspeed.zero_stage or trainer.num_ranks"
FEWER_TOKENS = "lower trainer.max_tokens_per_micro_batch"


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes: whose, what, the remedy if they are too many; and whether they are in the host's memory in any case."""

    owner: str
    what: str
    num_bytes: int
    remedy: str = ""
    is_host: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the model that is trained and served; `number_bytes` of a weight in training."""

    size: ModelSize
    architecture: Architecture
    number_bytes: int

    @property
    def weight_bytes(self) -> int:
        """All weights, once."""
        return self.size.num_parameters * self.number_bytes


def trainer_parts(owner: str, config: LaminarConfig, model: Model) -> Iterator[Part]:
    """One trainer rank."""
    trainer = config.trainer
    yield Part(owner, "programs", TRAINER_PROGRAM_BYTES, is_host=True)
    if trainer.kind == "emulated":
        yield Part(owner, "weights", model.weight_bytes)
        return
    yield from _trained(owner, config, model, "")
    options: Any = algorithm_options(config)
    if getattr(options, "baseline", "") == "critic":
        yield from _trained(owner, config, model, "critic's ")
    if getattr(options, "kl_coef", 0) > 0:
        away = trainer.keep_reference_on == "cpu"
        yield Part(owner, "reference", model.weight_bytes, 'set trainer.keep_reference_on = "cpu"', is_host=away)
    tokens, checkpointing = most_tokens_in_a_pass(config), trainer.gradient_checkpointing
    remedy = FEWER_TOKENS if checkpointing else f"set trainer.gradient_checkpointing = true, or {FEWER_TOKENS}"
    kept = activation_bytes(model.architecture, tokens, model.number_bytes, checkpointing=checkpointing)
    yield Part(owner, "activations", kept, remedy)
    yield Part(owner, "logits", logits_bytes(model.architecture.vocabulary_size, tokens), FEWER_TOKENS)


def most_tokens_in_a_pass(config: LaminarConfig) -> int:
    """Most tokens of one rank's forward pass: a full micro-batch, or its part of all its mini-batch's rows if fewer."""
    trainer = config.trainer
    groups = max(shares(trainer.prompts_per_step, trainer.mini_batches))
    rows = max(shares(groups * config.rollout.group_size, num_row_shares(config)))
    return min(trainer.max_tokens_per_micro_batch, -(-rows * longest_row_tokens(config) // trainer.sequence_parallel_size))


def _trained(owner: str, config: LaminarConfig, model: Model, whose: str) -> Iterator[Part]:
    trainer = config.trainer
    trained = trained_bytes(model.size.num_parameters, model.number_bytes, trainer.deepspeed.zero_stage, trainer.num_ranks)
    yield Part(owner, f"{whose}weights", trained.weights, 'set model.dtype = "bfloat16", or train a smaller model')
    yield Part(owner, f"{whose}gradients", trained.gradients, SPLIT)
    yield Part(owner, f"{whose}optimizer", trained.optimizer, SPLIT)


def engine_parts(owner: str, config: LaminarConfig, model: Model) -> Iterator[Part]:
    """One worker and its engine; on GPUs, what each of its devices holds. The torch engine maps weights, it has no copy."""
    engine = config.rollout.engine
    yield Part(owner, "programs", ROLE_PROGRAM_BYTES, is_host=True)
    if engine.kind == "emulated":
        return
    yield Part(owner, "engine's programs", ENGINE_PROGRAM_BYTES, is_host=True)
    if engine.kind != "torch":
        share = -(-model.weight_bytes // engine.tensor_parallel_size)
        yield Part(owner, "weights", share, "raise rollout.engine.tensor_parallel_size")
    cache = engine.max_cached_tokens * cache_bytes_per_token(config, model)
    remedy = "lower rollout.engine.max_cached_tokens"
    yield Part(owner, "key-value cache", cache, remedy + (", or raise tensor_parallel_size" if engine.num_gpus else ""))


def cache_bytes_per_token(config: LaminarConfig, model: Model) -> int:
    """Key and value of one token on one device of a replica; the cache has the type of the weights."""
    parts = config.rollout.engine.tensor_parallel_size
    return model.architecture.cache_bytes_per_token(model.number_bytes, parts)


def relay_part(machine: int, config: LaminarConfig, model: Model) -> Part:
    """The slots for weight versions in one machine's shared memory."""
    slots = num_weight_slots(config)
    what = f"{slots} slots for weights"
    return Part(
        f"relay-{machine}", what, slots * slot_bytes(model.weight_bytes), "lower relay.keep_versions, or give it more memory"
    )
