"""Turn what pydantic found wrong into sentences: the path, the value, what may stand there.

Pure. Unknown keys are not treated here (`laminar.config.hints` knows more about them).
"""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from laminar.config.redact import redact
from laminar.config.schema import ROOT, Path, Place, all_paths, child, describe, format_path
from laminar.config.toml_text import format_value

_LONGEST_VALUE = 60
_LARGEST_INTEGER = 2**63 - 1
"""What servers, arrays and files hold a whole number in."""


def complaints(error: ValidationError, tree: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Path and sentence of every wrong or missing value, once each, in pydantic's order."""
    sentences: dict[Path, str] = {}
    for found in error.errors(include_url=False, include_context=False):
        if found["type"] == "extra_forbidden":
            continue
        path, place = _settled_path(found["loc"])
        if found["type"] == "missing":
            sentences.update(_missing(path, place))
        else:
            sentences.setdefault(path, _wrong_value(path, place, _value_at(tree, path)))
    return list(sentences.items())


def unstorable(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Path and sentence of every value in a tree that no file or server can hold: numbers beyond 64 bits, text not UTF-8."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from unstorable(below, (*path, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from unstorable(below, (*path, index))
    elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        yield path, f"`{format_path(path)}` is {show_value(value)}: a whole number must be below 2^63"
    elif isinstance(value, str) and value != value.encode(errors="ignore").decode():
        yield path, f"`{format_path(path)}` is {value!a}: a name in it is not UTF-8 and could not be written down; rename it"


def _settled_path(location: tuple[int | str, ...]) -> tuple[Path, Place]:
    """The part of pydantic's location that names a place of the file; the rest names members of a union."""
    path: Path = ()
    place = ROOT
    for part in location:
        below = child(place, part)
        if below is None:
            break
        path, place = (*path, part), below
    return path, place


def _missing(path: Path, place: Place) -> dict[Path, str]:
    required = {path: place}
    if place.section is not None:
        required = {below: it for below, it in all_paths(place, path) if it.is_required and it.section is None}
    return {
        below: f"`{format_path(below)}` is missing: {it.description.partition('; ')[0].rstrip('.')}"
        for below, it in required.items()
    }


def _wrong_value(path: Path, place: Place, value: Any) -> str:
    sentence = f"`{format_path(path)}` is {show_value(redact(value, str(path[-1])))}: it must be {describe(place)}"
    if place.section is not None:
        return f"{sentence}, written as `[{format_path(path)}]`"
    if isinstance(value, Mapping) and describe(place) == "a list of tables":
        return f"{sentence}, each written as `[[{format_path(path)}]]`"
    if isinstance(value, str) and not place.is_text and _is_quoted_number(value):
        return f"{sentence}; take it out of its quotes"
    return sentence


def show_value(value: Any) -> str:
    """A value as it stands in the file, shortened."""
    try:
        text = format_value(value)
    except ValueError:  # Python does not write it out
        text = "a number of thousands of digits"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 4] + " ..."


def _is_quoted_number(text: str) -> bool:
    try:
        return not isinstance(tomllib.loads(f"value = {text}")["value"], str)
    except (ValueError, RecursionError):
        return False


def _value_at(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree
