"""Text that UTF-8 can hold: JSON may write lone surrogates, halves of a character, and a policy does."""

from collections.abc import Iterator, Mapping
from typing import Any


def storable(text: str) -> str:
    """The text with `?` for halves of a character."""
    return text.encode("utf-8", "replace").decode()


def half_of_a_character(value: Any) -> str:
    """The first one in a value's texts, keys included, however deep; empty if there is none."""
    for text in _texts(value):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return text[error.start]
    return ""


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                yield text
            case Mapping() as table:
                waiting += [*table.keys(), *table.values()]
            case list(values) | tuple(values) | set(values):
                waiting += values
