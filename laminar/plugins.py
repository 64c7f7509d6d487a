"""Find an implementation by its kind, and check its options.

One mechanism everywhere: `kind` is a name from a literal table, or the user's own `"package.module:Attr"`; a table's values
are such strings too, so nothing is imported that is not used. Options are validated strictly, by a `Section` that the
implementation names as its `Options`, or that its table gives apart (so that checking a config imports no torch).
Whatever a user's module raises while it is imported, other than that it is missing or malformed, is theirs and passes.
"""

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from laminar.config.redact import redact
from laminar.config.schema import Path, Place, all_paths, child, format_path, members
from laminar.config.section import Section
from laminar.errors import ConfigError

_MOST_NAMES = 3


def resolve(kind: str, table: Mapping[str, str], where: str = "kind") -> Any:
    """Import what a kind stands for.

    Args:
        kind: a key of `table`, or `"package.module:Attr"`.
        table: names to `"package.module:Attr"`.
        where: path of the setting, for errors.

    Raises:
        ConfigError: if the kind is unknown (with the nearest names), or cannot be imported.
    """
    return load_attribute(import_path(kind, table, where), where)


def import_path(kind: str, table: Mapping[str, str], where: str = "kind") -> str:
    """The `"package.module:Attr"` that a kind stands for; imports nothing.

    Raises:
        ConfigError: if the kind is neither in the table nor of that form.
    """
    if ":" in kind:
        return kind
    if kind in table:
        return table[kind]
    raise ConfigError(
        f"`{where}` is {kind!r}: {nearest(kind, table)}the names are {', '.join(table)}; "
        'your own goes by "package.module:Attr"'
    )


def load_attribute(path: str, where: str = "kind") -> Any:
    """Import `"package.module:Attr"`; `Attr` may have dots.

    Raises:
        ConfigError: if the text is malformed, or the module or the attribute is missing or cannot be read.
    """
    module_name, colon, attribute = path.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module_name.split("."), *attribute.split(".")))):
        raise ConfigError(f'`{where}` is {path!r}: it must have the form "package.module:Attr"')
    found = _import_module(module_name, path, where)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(f"`{where}` is {path!r}: {nearest(part, public)}{module_name} has no {attribute}")
        found = getattr(found, part)
    return found


def validate_options(attribute: Any, options: Mapping[str, Any], where: str = "options") -> Section | None:
    """Check a plugin's options with its own model.

    Args:
        attribute: the implementation, whose `Options` is the model; or the model itself; or None if it takes no options.
        options: as they stand in the config.
        where: path of the options, for errors.

    Returns:
        The options; None if the implementation takes none.

    Raises:
        ConfigError: if an option is unknown, missing or wrong, or any is given where none is taken.
    """
    model = options_model(attribute)
    if model is None:
        if options:
            raise ConfigError(f"`{where}` has {', '.join(options)}, but this kind takes no options; remove them")
        return None
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError("; ".join(_complaints(error, model, where))) from error


def options_model(attribute: Any) -> type[Section] | None:
    """The model of a plugin's options, or None if it takes none.

    Raises:
        ConfigError: if its `Options` would let a misspelt option pass.
    """
    model = attribute if _is_section(attribute) else getattr(attribute, "Options", None)
    if model is not None and not _is_section(model):
        name = getattr(attribute, "__qualname__", repr(attribute))
        raise ConfigError(
            f"`Options` of {name} must be a subclass of laminar.config.section.Section, which refuses unknown keys"
        )
    return model


def _is_section(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Section)


def _import_module(name: str, path: str, where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"`{where}` is {path!r}: there is no module {error.name}; put it beside the config file or install it"
            ) from error
        raise ConfigError(f"`{where}` is {path!r}: it needs the package {error.name}, which is not installed") from error
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"`{where}` is {path!r}: {name} cannot be imported: {error}") from error


def nearest(name: str, names: Iterable[str]) -> str:
    """A question that ends with a space, for an error about an unknown name; empty if no name is near."""
    near = difflib.get_close_matches(name, list(names), n=_MOST_NAMES)
    return f"did you mean {' or '.join(near)}? " if near else ""


def _complaints(error: ValidationError, model: type[Section], where: str) -> Iterator[str]:
    """A sentence for each fault; where a union's members complain about one value, those that came furthest in."""
    settled = [(_settle(found, model), found) for found in error.errors(include_url=False)]
    for (path, section), found in settled:
        if not any(len(other) > len(path) and other[: len(path)] == path for (other, _), _ in settled):
            yield _complaint(found, path, section, where)


def _settle(found: ErrorDetails, model: type[Section]) -> tuple[Path, type[Section] | None]:
    """The path that a fault is about (pydantic's location names members of unions, too), and the table it lies in."""
    path: Path = ()
    place, section = Place(model), None
    for number, part in enumerate(found["loc"]):
        below, is_last = child(place, part), number == len(found["loc"]) - 1
        if below is not None or (is_last and found["type"] == "extra_forbidden"):
            path, section = (*path, part), next((it.section for it in members(place) if it.section), None)
            place = below or place
    return path, section


def _complaint(found: ErrorDetails, path: Path, section: type[Section] | None, where: str) -> str:
    full = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    if found["type"] == "extra_forbidden":
        names = [field.alias or name for name, field in section.model_fields.items()] if section else []
        known = f"the options are {', '.join(names)}" if names else "remove it"
        return f"unknown key `{where}{full}`: {nearest(str(path[-1]), names) or _elsewhere(str(path[-1]), where)}{known}"
    if found["type"] == "missing":
        field = section.model_fields.get(str(path[-1])) if section else None
        described = field.description if field else None
        return f"`{where}{full}` is missing" + (f": {' '.join(described.split()).rstrip('.')}" if described else "")
    return f"`{where}{full}` is {redact(found['input'], ''.join(map(str, path[-1:])))!r}: {found['msg']}"


def _elsewhere(name: str, where: str) -> str:
    """Where a key belongs that is a setting of the same section, not an option; empty if there is none, or several."""
    section = where.partition(".")[0]
    places = [path for path, place in all_paths() if (path[0], path[-1]) == (section, name) and place.section is None]
    return f"it belongs at `{format_path(places[0])}`; " if len(places) == 1 else ""
