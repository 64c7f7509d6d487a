"""Plain values as TOML text.

What it writes, `tomllib` reads back as the same value. None has no TOML form and is left out: a setting may be None only
if None is its default.
"""

import json
import re
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def format_value(value: Any) -> str:
    """One value on one line; tables and lists in their inline form.

    Raises:
        TypeError: for a value that TOML cannot hold.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case datetime() | date() | time():
            return value.isoformat()
        case list() | tuple():
            return "[" + ", ".join(format_value(item) for item in value) + "]"
        case Mapping():
            pairs = [f"{_format_key(key)} = {format_value(item)}" for key, item in value.items() if item is not None]
            return "{" + ", ".join(pairs) + "}"
        case _:
            raise TypeError(f"{value!r} has no TOML form")


def format_document(table: Mapping[str, Any]) -> str:
    """A whole document: plain values first, then one `[table]` or `[[table]]` each for what lies below."""
    return "\n\n".join(block for block in _blocks(table, "", "") if block) + "\n"


def _blocks(table: Mapping[str, Any], path: str, header: str) -> list[str]:
    lines = [header] if header else []
    below: list[str] = []
    for key, value in table.items():
        name = f"{path}.{_format_key(key)}" if path else _format_key(key)
        if isinstance(value, Mapping) and value:
            below += _blocks(value, name, f"[{name}]")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                below += _blocks(item, name, f"[[{name}]]")
        elif value is not None:
            lines.append(f"{_format_key(key)} = {format_value(value)}")
    only_tables = lines == [header] and bool(below) and not header.startswith("[[")
    return ([] if only_tables else ["\n".join(lines)]) + below


def _format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else format_value(key)
