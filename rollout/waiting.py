"""Waiting under a condition, by a deadline that has a name."""

import asyncio
from collections.abc import Callable

from laminar.errors import DeadlineError


async def wait_until(changed: asyncio.Condition, is_so: Callable[[], bool], name: str, seconds: float) -> None:
    """Wait until `is_so`, looked at whenever `changed` is notified.

    Raises:
        DeadlineError: with the name of what was waited for.
    """
    try:
        async with asyncio.timeout(seconds), changed:
            await changed.wait_for(is_so)
    except TimeoutError:
        raise DeadlineError(name, seconds) from None
