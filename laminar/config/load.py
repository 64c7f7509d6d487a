"""Read a config file, apply overrides, refuse what is wrong; and write a config back.

All that is wrong is reported at once, one sentence each. Rules between several settings live in `laminar.config.check`.
"""

import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from laminar.config.complaints import complaints, unstorable
from laminar.config.hints import unknown_keys
from laminar.config.overrides import apply_override
from laminar.config.root import LaminarConfig
from laminar.config.schema import Path as KeyPath
from laminar.config.toml_text import format_document
from laminar.errors import ConfigError

_PATH_SETTINGS = (
    ("model", "path"),
    ("model", "tokenizer"),
    ("model", "reference"),
    ("model", "critic"),
    ("data", "path"),
    ("eval", "path"),
)
_HOME_SETTINGS = (("run", "directory"), ("relay", "root"))
"""Paths that need not exist: of these only `~` is resolved."""
_WHERE = re.compile(r"^(?P<what>.*) \(at (?:line (?P<line>\d+), column \d+|end of document)\)$", re.DOTALL)


def load_config(path: Path, overrides: Sequence[str] = ()) -> LaminarConfig:
    """The settings of one file with `section.key=value` overrides.

    Paths of local models and data come out absolute (see `resolve_path`), and the file's folder is appended last to
    `sys.path`, so that `"package.module:Attr"` beside the file is found.

    Raises:
        ConfigError: naming everything that is wrong.
    """
    tree = read_toml(path)
    faults: list[tuple[KeyPath, str]] = []
    overridden: list[KeyPath] = []
    for override in overrides:
        key, fault = apply_override(tree, override)
        overridden.append(key)
        if fault:
            faults.append((key, fault))
    if not faults:
        resolved = _resolved(tree, path.resolve().parent)
        faults = [*unknown_keys(tree), *unstorable(resolved)]
        config = _validate(resolved, faults)
        if config is not None and not faults:
            append_user_modules(config.run.config_directory)
            return config
    raise ConfigError(_report(path, faults, overridden))


def read_toml(path: Path) -> dict[str, Any]:
    """The tree of a TOML file.

    Raises:
        ConfigError: if the file is missing, unreadable or no TOML; duplicate keys are named with their line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_fault(path, text, str(error))) from None
    except ValueError as error:  # a number that Python itself refuses to read
        raise ConfigError(f"config file {path}: a number is too long ({error}); numbers must be below 2^63") from None
    except RecursionError:
        raise ConfigError(f"config file {path}: lists or tables lie too deep within each other; mend the brackets") from None


def dump_toml(config: LaminarConfig) -> str:
    """The whole config, defaults filled in, as TOML text that loads as the same config."""
    return format_document(config.model_dump())


def resolve_path(text: str, config_folder: Path, working_folder: Path) -> Path | None:
    """The existing file or folder that a setting names: from the config file's folder first, then from the working folder.

    Returns:
        An absolute path, or None if neither exists (then `text` may be the name of a model or dataset on the hub).
    """
    if not text:
        return None
    for folder in (config_folder, working_folder):
        candidate = folder / os.path.expanduser(text)  # unlike Path's, it leaves an unknown user's `~name` as it stands
        if os.path.exists(candidate):  # unlike Path's, it knows of a name too long that there is none
            return candidate.absolute()
    return None


def append_user_modules(folder: str) -> None:
    """Let `"package.module:Attr"` beside the config file be imported, after everything installed.

    Processes that receive a config, rather than load it, call this with `run.config_directory`.
    """
    if folder and folder not in sys.path:
        sys.path.append(folder)


def _validate(tree: dict[str, Any], faults: list[tuple[KeyPath, str]]) -> LaminarConfig | None:
    try:
        return LaminarConfig.model_validate(tree)
    except ValidationError as error:
        covered = [path for path, _ in faults]
        faults += [(path, text) for path, text in complaints(error, tree) if path not in covered]
        return None


def _resolved(tree: dict[str, Any], config_folder: Path) -> dict[str, Any]:
    """A copy of `tree` with absolute local paths. A resolved config keeps the folder that it first came from."""
    run = tree.get("run", {})
    if isinstance(run, dict):
        run = {**run, "config_directory": run.get("config_directory") or str(config_folder)}
    resolved = {**tree, "run": run}
    for section, key in _PATH_SETTINGS:
        table = resolved.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            found = resolve_path(table[key], config_folder, Path.cwd())
            if found is not None:
                resolved[section] = {**table, key: str(found)}
    for section, key in _HOME_SETTINGS:
        table = resolved.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            resolved[section] = {**table, key: os.path.expanduser(table[key])}
    return resolved


def _syntax_fault(path: Path, text: str, message: str) -> str:
    match = _WHERE.match(message)
    what, line = (match["what"], match["line"]) if match else (message, None)
    is_duplicate = any(word in what for word in ("overwrite", "twice", "mutate"))
    if is_duplicate and line is None:
        line = str(text.rstrip().count("\n") + 1)
    where = f"config file {path}" + (f", line {line}" if line else ", at its end")
    source = text.split("\n")[int(line) - 1].strip() if line else ""
    if is_duplicate:
        return f"{where}: `{source.partition('=')[0].strip()}` is given twice; keep one of them"
    hint = "text needs quotes" if what == "Invalid value" else "mend this line"
    return f"{where}: not TOML ({what[0].lower()}{what[1:]})" + (
        f" in `{source}`; {hint}" if source else "; the last value is incomplete"
    )


def _report(path: Path, faults: list[tuple[KeyPath, str]], overridden: list[KeyPath]) -> str:
    sentences = [
        f"{text} (from the command line)" if key in overridden and "on the command line" not in text else text
        for key, text in faults
    ]
    if len(sentences) == 1:
        return f"{path}: {sentences[0]}"
    return f"{path}: {len(sentences)} settings are wrong:" + "".join(f"\n  {sentence}" for sentence in sentences)
