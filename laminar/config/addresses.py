"""Addresses in settings, judged without asking anybody (pure). A fault does not repeat the address: it may hold a secret."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

_HTTP = "write an address such as http://host:8000/v1"


def port_fault(url: str) -> str | None:
    """What is wrong with the host and port of a URL; None if nothing is."""
    try:
        port = urlsplit(url).port
    except ValueError:
        return "its host and port cannot be read; a port is a number from 1 to 65535"
    if port == 0:
        return "nobody answers at port 0; give one from 1 to 65535"
    return "it holds a blank; remove it" if re.search(r"\s", url) else None


def http_fault(url: str) -> str | None:
    """What is wrong with the address of a web service; None if nothing is."""
    fault = port_fault(url)
    if fault:
        return fault
    parts = urlsplit(url)
    return None if parts.scheme in ("http", "https") and parts.hostname else _HTTP


def _checked(url: str) -> str:
    if fault := http_fault(url):
        raise ValueError(fault)
    return url


HttpUrl = Annotated[str, AfterValidator(_checked)]
"""Type of an option that is the address of a web service."""
