"""Models named on the Hugging Face hub: fetched once by the supervisor, so that every role reads a local folder."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError, first_line

WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Weights, config and tokenizer; no other weight formats, no code."""


def with_local_model(config: LaminarConfig) -> LaminarConfig:
    """The config with its models and tokenizer as local folders.

    Raises:
        ConfigError: the hub does not have the model, or cannot be reached and no earlier download is there.
    """
    model = config.model
    names = ("path", "tokenizer", "reference", "critic")
    local = {name: local_folder(value) for name in names if (value := getattr(model, name))}
    return config.model_copy(update={"model": model.model_copy(update=local)})


def local_folder(name: str) -> str:
    """A folder as it is; a hub name's snapshot, downloaded if need be."""
    if Path(name).is_dir():
        return name
    try:
        return snapshot_download(name, allow_patterns=WANTED)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {name!r} is no folder here and cannot be fetched from the hub: {first_line(error)}"
        ) from error
