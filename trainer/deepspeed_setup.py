"""A module and its AdamW put under DeepSpeed: the settings that are ours to choose, and an import without side effects.

Knows neither what the module computes nor how its state is saved.
"""

import contextlib
import io
import logging
import os
import warnings
from typing import Any

import torch
from torch import nn

from laminar.config.trainer import TrainerConfig

logger = logging.getLogger("laminar.trainer.engine")

_OFFLOADED = {"device": "cpu", "pin_memory": torch.cuda.is_available()}


def zero_stage(config: TrainerConfig, dtype: torch.dtype) -> int:
    """The ZeRO stage in use: under bfloat16, stage 0 would keep gradients in bfloat16; 1 has float32 sums and weights."""
    return max(config.deepspeed.zero_stage, int(dtype == torch.bfloat16))


def initialize_deepspeed(module: nn.Module, dtype: torch.dtype, adam: torch.optim.Optimizer, config: TrainerConfig) -> Any:
    """The module's DeepSpeed engine; all ranks call it together, in a process group that is there already.

    Args:
        module: on its device.
        dtype: of its parameters.
        adam: over its trained parameters.
        config: the trainer's settings.
    """
    deepspeed = import_deepspeed()
    stage, settings = zero_stage(config, dtype), config.deepspeed
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = settings.max_whole_parameter
    if settings.offload_optimizer:
        zero["offload_optimizer"] = _OFFLOADED
    chosen = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # theirs is compiled at first use; torch's fused AdamW runs on CPUs, too
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }
    with contextlib.redirect_stdout(io.StringIO()) as chatter:
        engine, *_ = deepspeed.initialize(model=module, optimizer=adam, config=chosen, dist_init_required=False)
    logger.debug("DeepSpeed says: %s", chatter.getvalue())
    return engine


def import_deepspeed() -> Any:
    """Import DeepSpeed quietly, and without its shared-memory collectives.

    Those are compiled at first use, for 40 s, under a lock file that a kill leaves behind, on which every later run hangs;
    and their shared memory is named by user and port, so two runs on one host could meet. gloo does the same work.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # its calls of older names

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    chatter = logging.getLogger("DeepSpeed")
    chatter.handlers.clear()
    chatter.setLevel(logging.WARNING)
    chatter.propagate = True
    return deepspeed
