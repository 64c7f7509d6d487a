"""A tool: a name, a JSON schema, and a function that takes checked arguments.

The schema comes from the function's type hints and its docstring (Google style); the same hints check what the policy sends.
This module does not know how calls are written, nor who makes them.
"""

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from laminar.errors import ConfigError

_ARGUMENT = re.compile(r"^\s{2,}(\w+)(?: \([^)]*\))?:\s*(.+)$")


class ToolError(ValueError):
    """What a tool tells the policy instead of a result; so does any other ValueError, LookupError or ArithmeticError."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One callable thing.

    Attributes:
        name: what the policy calls it.
        schema: as chat templates and OpenAI's API take it: `{"type": "function", "function": {...}}`.
        call: plain or `async`; takes the checked arguments by name.
        check: turns the policy's arguments into checked ones.
    """

    name: str
    schema: Mapping[str, Any]
    call: Callable[..., Any]
    check: Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ToolSource(Protocol):
    """Gives tools that live as long as one episode."""

    async def open(self) -> Sequence[Tool]:
        """Make the tools ready."""
        ...

    async def close(self) -> None:
        """Let go of everything; also called if `open` failed."""
        ...


@functools.cache
def tool_from_function(function: Callable[..., Any]) -> Tool:
    """A tool out of a function.

    Raises:
        ConfigError: a parameter has no type hint, or takes any number of arguments.
    """
    name = function.__name__
    description, texts = _read_docstring(inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} needs a type hint and must take one value")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], Field(default, description=texts.get(parameter.name)))
    model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    return Tool(name, _schema(name, description, model), function, functools.partial(_check, model))


def result_text(value: Any) -> str:
    """What a tool returned, as the policy reads it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _schema(name: str, description: str, model: type[BaseModel]) -> Mapping[str, Any]:
    parameters = model.model_json_schema()
    parameters.pop("title", None)
    parameters.pop("additionalProperties", None)
    for entry in parameters.get("properties", {}).values():
        entry.pop("title", None)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _check(model: type[BaseModel], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        checked = model.model_validate(dict(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "arguments"
        raise ToolError(f"{where}: {first['msg']}") from error
    return {name: getattr(checked, name) for name in model.model_fields}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the texts of the section `Args`."""
    head, _, rest = text.partition("Args:\n")
    arguments: dict[str, str] = {}
    for line in rest.splitlines():
        if line.strip() and not line.startswith(" "):
            break
        if found := _ARGUMENT.match(line):
            arguments[found[1]] = found[2]
    return " ".join(head.strip().split("\n\n")[0].split()), arguments
