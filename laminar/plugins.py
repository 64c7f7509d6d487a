"""Find an implementation by its kind, and check its options.

One mechanism everywhere: `kind` is a name from a literal table, or the user's own `"package.module:Attr"`; a table's values
are such strings too, so nothing is imported that is not used. Options are validated strictly, by a `Section` that the
implementation names as its `Options`, or that its table gives apart (so that checking a config imports no torch).
Whatever a user's module raises while it is imported, other than that it is missing or malformed, is theirs and passes.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

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
        raise ConfigError("; ".join(_complaint(found, model, where) for found in error.errors(include_url=False))) from error


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


def _complaint(found: Mapping[str, Any], model: type[Section], where: str) -> str:
    location = found["loc"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    if found["type"] == "extra_forbidden":
        names = list(model.model_fields) if len(location) == 1 else []
        known = f"the options are {', '.join(names)}" if names else "remove it"
        return f"unknown key `{where}{path}`: {nearest(str(location[-1]), names)}{known}"
    if found["type"] == "missing":
        described = model.model_fields[location[0]].description if len(location) == 1 else None
        return f"`{where}{path}` is missing" + (f": {' '.join(described.split()).rstrip('.')}" if described else "")
    return f"`{where}{path}` is {found['input']!r}: {found['msg']}"
