"""What a replica needs of an engine that was started, and how one is started. It knows no kind of engine."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from laminar.types import WeightVersion
from rollout.engines.client import EngineClient


class EngineHandle(Protocol):
    """An engine that was started: `EngineProcess`, or what stands in for one."""

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        ...

    async def kill(self) -> None:
        """End it at once."""
        ...


StartEngine = Callable[[Path, WeightVersion], Awaitable[tuple[EngineHandle, EngineClient]]]
"""Starts an engine on a folder of weights; ready when it returns."""
