"""The base of all config models: unknown keys are refused, values are frozen, numbers are finite, text stays text."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A table of the config file. Strict: no unknown key, no silent conversion, no NaN."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )


class Plugin(Section):
    """A choice among implementations: a name from our table or the user's own `"package.module:Attr"`."""

    kind: str
    """Name of the implementation, or `"package.module:Attr"`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The implementation's own settings, validated by its own model."""
