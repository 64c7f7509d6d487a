"""A checkpoint's policy as a plain Hugging Face folder: what `transformers` and every engine load. Files only, no torch.

Invariants: what is exported has the checkpoint's checksums, so its parameters are bit for bit those that were trained; the
folder appears by one rename; an existing folder with something in it is never touched.

It does not know optimizer states, critics or runs' processes.
"""

import json
import shutil
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.config.load import load_config
from laminar.config.system import ModelConfig
from laminar.errors import ConfigError
from relay.model_files import TOKENIZER_FILES, copy_model_files
from trainer.checkpoint_folder import MANIFEST, checkpoint_path, complete_checkpoints, find_latest, read_manifest

MODEL = "model"
"""Folder of the policy in a checkpoint."""
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a model comes from.

    Attributes:
        checkpoint: its folder.
        step: that it was saved after.
        config: the run's config file; None if there is none beside the checkpoints.
    """

    checkpoint: Path
    step: int
    config: Path | None


def find_origin(source: Path, step: int | None = None) -> Origin:
    """The checkpoint that a path means: of a run folder the newest whole one, or that of a step; a checkpoint itself.

    Raises:
        ConfigError: there is none, it is damaged (it names the file), or it has no policy.
    """
    root = source / "checkpoints"
    if (source / MANIFEST).is_file():
        if step is not None:
            raise ConfigError(f"{source} is one checkpoint: --step {step} chooses among those of a run folder; leave it out")
        checkpoint, root = source, source.parent
    elif root.is_dir():
        checkpoint = _choose(root, step)
    else:
        raise ConfigError(f"{source} is neither a run folder nor a checkpoint in one (checkpoints/step_000050)")
    step = int(read_manifest(checkpoint)["step"])
    if not (checkpoint / MODEL).is_dir():
        raise ConfigError(
            f'checkpoint {checkpoint} has no {MODEL}/: it is of a run with trainer.kind = "emulated", which trains nothing; '
            "name another run"
        )
    config = root.resolve().parent / "config.toml"
    return Origin(checkpoint, step, config if config.is_file() else None)


def export_model(source: Path, folder: Path, step: int | None = None) -> str:
    """Write a checkpoint's policy, with its config and tokenizer, as a plain Hugging Face folder.

    Args:
        source: a run folder or a checkpoint.
        folder: to be made; may exist if it is empty.
        step: of which checkpoint of the run; None: the newest.

    Returns:
        One line that says what was written.

    Raises:
        ConfigError: there is no whole checkpoint, or the folder is in use or cannot be written.
    """
    origin = find_origin(source, step)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _fill(staging, origin)
            staging.chmod(0o755)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror or error}); choose another folder") from error
    return f"{folder}: the policy after step {origin.step}, from {origin.checkpoint}"


def _choose(root: Path, step: int | None) -> Path:
    if step is not None:
        if not checkpoint_path(root, step).is_dir():
            there = ", ".join(str(int(path.name.partition("_")[2])) for path in complete_checkpoints(root)) or "none"
            raise ConfigError(f"{root} has no checkpoint of step {step}; there are those of: {there}")
        return checkpoint_path(root, step)
    latest = find_latest(root)
    if latest is None:
        raise ConfigError(f"{root} has no checkpoint yet; one is saved every checkpoint.every_steps, and at the end")
    return latest


def _fill(staging: Path, origin: Origin) -> None:
    copy_model_files(origin.checkpoint / MODEL, staging)
    for weights in (origin.checkpoint / MODEL).glob("*.safetensors"):
        shutil.copyfile(weights, staging / weights.name)
    _say_dtype(staging)
    tokenizer = _model_config(origin).tokenizer if origin.config else ""
    if tokenizer and Path(tokenizer).is_dir():
        copy_model_files(Path(tokenizer), staging, TOKENIZER_FILES)


def _model_config(origin: Origin) -> ModelConfig:
    assert origin.config is not None
    return load_config(origin.config).model


def _say_dtype(folder: Path) -> None:
    """Let the config name the number type of the weights: it may have been trained in another one than it came in."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    dtype = _stored_dtype(folder)
    name = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    if dtype is not None and config.get(name) != dtype:
        path.write_text(json.dumps({**config, name: dtype}, indent=2) + "\n")


def _stored_dtype(folder: Path) -> str | None:
    """The number type that most of the weights are stored in, from the files' headers."""
    bytes_of: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                first, last = tensor["data_offsets"]
                bytes_of[tensor["dtype"]] = bytes_of.get(tensor["dtype"], 0) + last - first
    return _DTYPE_NAMES.get(max(bytes_of, key=lambda dtype: bytes_of[dtype])) if bytes_of else None
