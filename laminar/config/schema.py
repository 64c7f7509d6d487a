"""The config models as a tree of named places, so that messages can say what stands where.

Knows the models, not any file or value. A path is a tuple of keys and list indices: `("rewards", 0, "weight")`.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from laminar.config.root import LaminarConfig
from laminar.config.section import Section

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """What the config says about one path.

    Attributes:
        annotation: the type, without `Annotated`.
        limits: annotated constraints, such as `Ge(1)`.
        description: the field's one-line docstring; empty for items of lists and tables.
        is_required: whether the file must give it.
    """

    annotation: Any
    limits: tuple[Any, ...] = ()
    description: str = ""
    is_required: bool = False

    @property
    def section(self) -> type[Section] | None:
        """The model, if this place is a table of settings."""
        return self.annotation if isinstance(self.annotation, type) and issubclass(self.annotation, Section) else None

    @property
    def is_text(self) -> bool:
        """Whether every value allowed here is text."""
        return _is_text(self.annotation)


ROOT = Place(LaminarConfig)


def child(place: Place, part: str | int) -> Place | None:
    """The place one step below, of a union by the first member that has one, or None if the models know no such key."""
    if _options_of(place.annotation):
        return next(filter(None, (child(member, part) for member in members(place))), None)
    if place.section is not None:
        fields = {field.alias or name: field for name, field in place.section.model_fields.items()}
        return _from_field(fields[part]) if part in fields else None
    origin, arguments = get_origin(place.annotation), get_args(place.annotation)
    if origin is list and isinstance(part, int):
        return _from_annotation(arguments[0])
    if origin is dict and isinstance(part, str):
        return _from_annotation(arguments[1])
    return None


def members(place: Place) -> list[Place]:
    """What may stand at a place: the members of a union, else the place itself."""
    return [_from_annotation(option) for option in _options_of(place.annotation)] or [place]


def place_at(path: Path) -> Place | None:
    """The place at `path`, or None if the models know no such key."""
    place: Place | None = ROOT
    for part in path:
        place = child(place, part) if place else None
    return place


def all_paths(place: Place = ROOT, path: Path = ()) -> Iterator[tuple[Path, Place]]:
    """Every key of the config with its place; items of a list of tables stand at index 0."""
    if place.section is None:
        item = child(place, 0)
        if item is not None and item.section is not None:
            yield from all_paths(item, (*path, 0))
        return
    for name in place.section.model_fields:
        below = child(place, name)
        if below is not None:
            yield (*path, name), below
            yield from all_paths(below, (*path, name))


def format_path(path: Path) -> str:
    """`("rewards", 0, "weight")` as `rewards[0].weight`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def describe(place: Place) -> str:
    """What may stand at a place, in words: "a whole number, at least 1"."""
    limits = [text for text in map(_describe_limit, place.limits) if text]
    return f"{_describe_type(place.annotation)} {' and '.join(limits)}".strip()


def _from_field(field: FieldInfo) -> Place:
    return Place(field.annotation, tuple(field.metadata), field.description or "", field.is_required())


def _from_annotation(annotation: Any) -> Place:
    if get_origin(annotation) is Annotated:
        base, *extras = get_args(annotation)
        limits = [limit for extra in extras for limit in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return Place(base, tuple(limits))
    return Place(annotation)


def _options_of(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def _is_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    options = [option for option in _options_of(annotation) if option is not type(None)]
    return annotation is str or (bool(options) and all(_is_text(option) for option in options))


def _describe_type(annotation: Any) -> str:
    place = _from_annotation(annotation)
    if place.section is not None:
        return "a table"
    options = [option for option in _options_of(annotation) if option is not type(None)]
    if options:
        return " or ".join(describe(_from_annotation(option)) for option in options)
    if get_origin(annotation) is Literal:
        values = [f'"{value}"' if isinstance(value, str) else str(value) for value in get_args(annotation)]
        return ", ".join(values[:-1]) + " or " + values[-1] if len(values) > 1 else values[0]
    if get_origin(annotation) is list:
        item = _from_annotation(get_args(annotation)[0])
        return "a list of tables" if item.section else f"a list whose items are each {describe(item)}"
    if get_origin(annotation) is dict:
        return "a table"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}.get(annotation, "a value")


def _describe_limit(limit: Any) -> str:
    wordings = {
        "ge": "of at least {}",
        "gt": "above {}",
        "le": "at most {}",
        "lt": "below {}",
        "min_length": "of length {} or more",
        "pattern": "that matches {}",
    }
    for name, wording in wordings.items():
        value = getattr(limit, name, None)
        if value is not None:
            return wording.format(f"{value:g}" if isinstance(value, float) else value)
    return ""
