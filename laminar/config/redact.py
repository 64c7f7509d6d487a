"""Secrets in settings, starred for whoever is shown them (pure)."""

import re
from typing import Any

from laminar.experience.client import hide_password

_WORDS = "password|passwd|passphrase|secrets?|token|bearer|authorization|cookie|keys?|apikey|credentials?|webhook"
_SECRET = re.compile(rf"(^|[_-])({_WORDS})$", re.IGNORECASE)


def redact(value: Any, key: str = "") -> Any:
    """A copy with passwords, tokens and keys starred, and the passwords within URLs."""
    if isinstance(value, dict):
        return {name: redact(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [redact(inner, key) for inner in value]
    if isinstance(value, str) and value:
        return "***" if _SECRET.search(key) else hide_password(value) if "://" in value else value
    return value
