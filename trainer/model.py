"""Loading the policy's model from a Hugging Face folder, and what it can do."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar

from laminar.config.system import ModelConfig
from laminar.errors import ConfigError

_DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(config: ModelConfig, *, gradient_checkpointing: bool, flash: bool = False) -> PreTrainedModel:
    """Load the policy with every dropout at 0, so that one model has one probability for a token.

    Args:
        config: `[model]`.
        gradient_checkpointing: recompute activations in the backward pass.
        flash: use flash attention if it is installed and the model is in bfloat16.

    Raises:
        ConfigError: if the folder holds no causal model, or one in a dtype that is not trained here.
    """
    disable_progress_bar()
    try:
        model_config = AutoConfig.from_pretrained(config.path, local_files_only=True)
        for name, value in model_config.to_dict().items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(model_config, name, 0.0)
        dtype = _DTYPES[config.dtype]
        is_flash = flash and is_flash_attn_2_available() and torch.bfloat16 in (dtype, model_config.dtype)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.path,
            config=model_config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,  # a checkpoint may come from anybody, and a .bin is a pickle
            attn_implementation="flash_attention_2" if is_flash else None,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path {config.path} holds no causal model that transformers loads from safetensors (not .bin): {error}"
        ) from error
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f'model.path {config.path} is stored in {model.dtype}: set model.dtype = "bfloat16" or "float32"')
    if gradient_checkpointing:
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )  # renamed in 5.x
        enable({"use_reentrant": False})
    model.train()
    return model


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether every layer keeps plain keys and values of all tokens (no sliding window, no recurrent state)."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
