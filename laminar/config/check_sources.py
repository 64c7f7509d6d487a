"""Judge the models and data that a config names: on this machine, or a name on the Hugging Face hub?

Looks at the file system only; the hub is asked when the run starts.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from laminar.config.root import LaminarConfig

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_LOCAL_FOLDERS = ("models", "model", "data", "datasets", "checkpoints", "runs", "outputs")
"""First parts of relative paths that are surely no organisation's name on the hub."""
_DATA_SUFFIXES = (".jsonl", ".parquet")
_ABSENT = "nothing of that name lies beside the config file or in the working folder"


def is_hub_name(text: str) -> bool:
    """Whether `text` can be `owner/name` on the hub (of a dataset also `owner/name:configuration`), not a local path."""
    first = text.partition("/")[0]
    is_file = text.endswith((*_DATA_SUFFIXES, ".json", ".csv"))
    is_local = is_file or first in _LOCAL_FOLDERS or os.path.exists(first) or os.path.exists(text)
    return bool(_HUB_NAME.fullmatch(text)) and not is_local


def source_faults(config: LaminarConfig) -> Iterator[str]:
    """One sentence for every model or data set that is neither here nor a name on the hub."""
    for setting, text in _model_settings(config):
        yield from _model_faults(setting, text)
    for setting, text in _data_settings(config):
        yield from _data_faults(setting, text)


def source_notes(config: LaminarConfig) -> Iterator[str]:
    """One sentence for every name that will be looked up on the hub, and for an interpreter that is not there yet."""
    for setting, text in (*_model_settings(config), *_data_settings(config)):
        if is_hub_name(text):
            yield f'`{setting}` is "{text}", not here: taken for a name on the Hugging Face hub, loaded at start'
    python = config.rollout.engine.python
    if python and shutil.which(python) is None:
        yield f'`rollout.engine.python` is "{python}", not here yet as a program: it must be when the run starts'


def _model_faults(setting: str, text: str) -> Iterator[str]:
    path = Path(text)
    if os.path.isdir(path):
        if setting != "model.tokenizer" and not (path / "config.json").is_file():
            yield f'`{setting}` is "{text}": the folder holds no config.json; give the folder of a Hugging Face model'
    elif os.path.exists(path):
        yield f'`{setting}` is "{text}": that is a file; give the folder of a Hugging Face model'
    elif not is_hub_name(text) or ":" in text:
        yield f'`{setting}` is "{text}": {_ABSENT}; give a model\'s folder, or owner/name on the Hugging Face hub'


def _data_faults(setting: str, text: str) -> Iterator[str]:
    path = Path(text)
    if os.path.isfile(path):
        if path.suffix not in _DATA_SUFFIXES:
            yield f'`{setting}` is "{text}": give a .jsonl or .parquet file, or a Hugging Face dataset'
    elif not os.path.exists(path) and not is_hub_name(text):
        yield f'`{setting}` is "{text}": {_ABSENT}; give a file, or owner/name of a dataset on the Hugging Face hub'


def _model_settings(config: LaminarConfig) -> list[tuple[str, str]]:
    optional = ((name, getattr(config.model, name)) for name in ("tokenizer", "reference", "critic"))
    return [("model.path", config.model.path), *((f"model.{name}", text) for name, text in optional if text)]


def _data_settings(config: LaminarConfig) -> list[tuple[str, str]]:
    held_out = [("eval.path", config.eval.path)] if config.eval.path else []
    return [("data.path", config.data.path), *held_out]
