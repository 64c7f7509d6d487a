"""Settings from the command line: `trainer.learning_rate=1e-6`, `rewards[0].weight=2`.

The value is read as a TOML value; what is none is text. A setting that is text takes the characters as they stand, so
`run.name=2` names the run "2" (in a file it would have to be quoted): a shell has eaten the quotes already. A key with a dot
in it stands in quotes, as in a file: `simulate.length_quantiles."p99.9"=3000`.
Pure: changes the tree it is given, touches no file.
"""

import re
import tomllib
from typing import Any

from laminar.config.schema import Path, format_path, place_at

_NAME = r'(?:[A-Za-z0-9_-]+|"[^"]*")(?:\[\d+\])*'
_KEY = re.compile(rf"{_NAME}(\.{_NAME})*")
_PART = re.compile(r'[A-Za-z0-9_-]+|"[^"]*"|\[\d+\]')


def apply_override(tree: dict[str, Any], override: str) -> tuple[Path, str | None]:
    """Set one value in `tree`.

    Returns:
        The path it names, and what is wrong with it (None if it was applied).
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key):
        return (), f"`{override}` on the command line: write it as section.key=value, such as trainer.learning_rate=1e-6"
    path: Path = tuple(int(part[1:-1]) if part.startswith("[") else part.strip('"') for part in _PART.findall(key))
    return path, _put(tree, path, parse_value(text.strip(), path))


def parse_value(text: str, path: Path) -> Any:
    """The value that `text` means for the setting at `path`."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML, a number that is too long, or brackets without end
        return text
    if list(document) != ["value"]:
        return text
    place = place_at(path)
    value = document["value"]
    return text if place is not None and place.is_text and not isinstance(value, str) else value


def _put(tree: dict[str, Any], path: Path, value: Any) -> str | None:
    here: Any = tree
    for depth, part in enumerate(path):
        if isinstance(part, int):
            num_items = len(here) if isinstance(here, list) else 0
            if part >= num_items:
                return _unreachable(path, depth, f"has {num_items} items; add it in the file")
        elif not isinstance(here, dict):
            return _unreachable(path, depth, "is not a table, so nothing lies below it")
        if depth == len(path) - 1:
            here[part] = value
        else:
            here = here[part] if isinstance(part, int) else here.setdefault(part, _empty(path[depth + 1]))
    return None


def _unreachable(path: Path, depth: int, reason: str) -> str:
    return f"`{format_path(path)}` on the command line: `{format_path(path[:depth])}` {reason}"


def _empty(next_part: str | int) -> Any:
    return [] if isinstance(next_part, int) else {}
