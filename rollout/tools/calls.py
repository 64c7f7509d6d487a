"""How models write calls: text in, calls out, and a sentence for everything that was meant as a call but is none.

Formats: `hermes` (also Qwen's: JSON between `<tool_call>` tags), `llama` (Llama 3's: a JSON object with `parameters`,
several parted by `;`), `pythonic` (Llama 3.2's and 4's: a list of Python calls). Pure; it does not know any tool.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from laminar.text import half_of_a_character

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_PYTHONIC = re.compile(r"\s*\[\s*\w+\(.*", re.DOTALL)
_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the policy wrote it; nothing is known of the tool yet."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a turn says.

    Attributes:
        text: what is left of it without calls.
        calls: in the order of the text; a string stands in the place of one that is malformed, and says why.
    """

    text: str
    calls: tuple[Call | str, ...] = ()


def parse_hermes(text: str) -> ParsedTurn:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times."""
    calls = [
        _from_json(found[1], "arguments") if found[2] else "the closing </tool_call> is missing"
        for found in _HERMES.finditer(text)
    ]
    return ParsedTurn(_HERMES.sub("", text).strip() if calls else text, tuple(calls))


def parse_llama(text: str) -> ParsedTurn:
    """`{"name": ..., "parameters": {...}}`, alone in the turn, or several parted by `;`."""
    tagged = text.strip().startswith(_TAG)
    body = text.strip().removeprefix(_TAG).strip()
    if not (tagged or (body.startswith("{") and '"name"' in body)):
        return ParsedTurn(text)
    calls: list[Call | str] = []
    while body:
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except (ValueError, RecursionError) as error:
            calls.append(f"it is not valid JSON: {error}")
            break
        calls.append(_from_value(value, "parameters"))
        body = body[end:].lstrip()
        if body and not body.startswith(";"):
            calls.append(f"there is more behind the call: {body[:40]!r}")
            break
        body = body[1:].lstrip()
    return ParsedTurn("", tuple(calls))


def parse_pythonic(text: str) -> ParsedTurn:
    """`[first(a=1), second(b="x")]`, alone in the turn; arguments are literals by name."""
    body = text.strip().removeprefix(_TAG).strip()
    if not _PYTHONIC.fullmatch(body):
        return ParsedTurn(text)
    try:
        expression = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ParsedTurn("", (f"it is not a list of calls: {error}",))
    if not isinstance(expression, ast.List):
        return ParsedTurn("", ("it is not a list of calls",))
    return ParsedTurn("", tuple(_from_syntax(element) for element in expression.elts))


PARSERS: Mapping[str, Callable[[str], ParsedTurn]] = {
    "hermes": parse_hermes,
    "llama": parse_llama,
    "pythonic": parse_pythonic,
}
"""Formats by name."""


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call in the format `hermes`, as a chat template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)}, ensure_ascii=False)}\n</tool_call>"


def _from_json(text: str, key: str) -> Call | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}"
    return _from_value(value, key)


def _from_value(value: Any, key: str) -> Call | str:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'it must be an object with "name"'
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        return f'"{key}" must be an object'
    return _whole(Call(value["name"], arguments))


def _from_syntax(element: ast.expr) -> Call | str:
    if not isinstance(element, ast.Call) or not isinstance(element.func, ast.Name):
        return "it must be a call by name"
    if element.args or any(keyword.arg is None for keyword in element.keywords):
        return f"{element.func.id}: arguments must be given by name"
    try:
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in element.keywords}
        json.dumps(arguments)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return f"{element.func.id}: arguments must be literals that JSON can hold"
    return _whole(Call(element.func.id, arguments))


def _whole(call: Call) -> Call | str:
    half = half_of_a_character([call.name, call.arguments])
    return f"it holds half of a character, {half!r}; write it whole or leave it out" if half else call
