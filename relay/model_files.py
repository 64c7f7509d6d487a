"""The model's files beside its weights (config, tokenizer and the like): staged once in a store, linked into every version.

Which they are is said here for all: versions, checkpoints and exports.

Invariants: when all new files are here, each appears by one rename; one that stays the same is left alone; what goes, goes
last. So whoever lists the folder meanwhile finds whole files, of which one may be gone before it is read.
Names that start with a dot are work in progress.
Does not know who sends them (`relay.sender`, `relay.receiver`).
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from laminar.errors import ConfigError, RelayError
from relay.manifest import checksum
from relay.slots import room_for

TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "*_vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "bpe.codes",
    "dict.txt",
    "encoder.json",
    "emoji.json",
    "normalizer.json",
    "tekken.json",
    "*.model",
    "tokenizer.model.v*",
    "*.spm",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""What a tokenizer of `transformers` is loaded from."""
MODEL_FILES = ("config.json", "generation_config.json", "*processor_config.json", *TOKENIZER_FILES)
"""What of a model folder goes along with trained weights, besides the model's own code. Whatever else lies there (weights in
any format, optimizer states, logs, licences, an adapter's config) stays there."""

ARRIVING_PREFIX = ".arriving-"


def model_files(folder: Path, patterns: Sequence[str] = MODEL_FILES) -> list[Path]:
    """Which files of a model folder its weights are loaded with, as paths in it; the code, too, if a config names some.

    Links are followed, as a hub's cache has them; hidden files are left out.
    """
    found = {path.relative_to(folder) for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if any(_names_code(folder / name) for name in found):
        found |= {path.relative_to(folder) for path in folder.glob("*.py") if path.is_file()}
    return sorted(name for name in found if not name.name.startswith("."))


def copy_model_files(source: Path, target: Path, patterns: Sequence[str] = MODEL_FILES) -> None:
    """Copy what `model_files` says into a folder, which is made.

    Raises:
        OSError: it cannot be written.
    """
    target.mkdir(exist_ok=True)
    for name in model_files(source, patterns):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _names_code(path: Path) -> bool:
    """Whether a config maps classes to code that lies beside it."""
    if not path.name.endswith("config.json"):
        return False
    with suppress(ValueError):
        config = json.loads(path.read_text())
        return isinstance(config, dict) and "auto_map" in config
    return False


def finished_files(folder: Path) -> list[Path]:
    """The files of a folder that are whole, by name."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def describe_files(folder: Path) -> dict[str, str]:
    """Name -> xxh3_64 of every finished file in a folder.

    Raises:
        FileNotFoundError: if they are being replaced: ask again.
    """
    return {path.name: checksum(path.read_bytes()) for path in finished_files(folder)}


def pack_files(folder: Path) -> tuple[list[tuple[str, int]], bytes]:
    """The finished files of a folder: (name, bytes) of each, and all their contents, one after another.

    Raises:
        FileNotFoundError: as `describe_files`.
    """
    contents = [(path.name, path.read_bytes()) for path in finished_files(folder)]
    return [(name, len(data)) for name, data in contents], b"".join(data for _, data in contents)


def unpack_files(folder: Path, sizes: list[tuple[str, int]], body: bytes, expected: dict[str, str]) -> None:
    """Replace the files of a folder by those that were sent.

    Raises:
        RelayError: if they are not what was offered; nothing is replaced then.
        EnvironmentSetupError: if there is no room for them; nothing is replaced then.
    """
    contents: dict[str, bytes] = {}
    start = 0
    for name, num_bytes in sizes:
        contents[name] = body[start : start + num_bytes]
        start += num_bytes
    if start != len(body) or {name: checksum(data) for name, data in contents.items()} != expected:
        raise RelayError("the model's files came broken")
    if unsafe := [name for name in contents if Path(name).name != name or name.startswith(".")]:
        raise RelayError(f"a model file is called {unsafe[0]!r}, which is no plain file name")
    _replace(folder, contents)


def stage_model_files(source: Path, target: Path) -> None:
    """Replace the files of a folder by a model folder's config, tokenizer and the like.

    Versions have no folders in them, so additional chat templates stay behind: who renders messages reads `model.path`.

    Raises:
        ConfigError: if there is no config.json.
        EnvironmentSetupError: if there is no room for them; nothing is replaced then.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(f"model folder {str(source)!r} has no config.json: set model.path to a Hugging Face model")
    chosen = [name for name in model_files(source) if len(name.parts) == 1]
    _replace(target, {name.name: (source / name).read_bytes() for name in chosen})


def _replace(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Make a folder hold these files and no others."""
    arriving = {folder / f"{ARRIVING_PREFIX}{n}": n for n, data in contents.items() if not _holds(folder / n, data)}
    with ExitStack() as undo, room_for("the model's files", folder, sum(map(len, contents.values()))):
        for hidden, name in arriving.items():
            undo.callback(hidden.unlink, missing_ok=True)
            hidden.write_bytes(contents[name])
        undo.pop_all()
    for hidden, name in arriving.items():
        hidden.rename(folder / name)
    for path in folder.iterdir():
        if path.name not in contents:
            path.unlink()


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data
