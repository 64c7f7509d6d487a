"""What a replica needs of an engine that was started, and how one is started. It knows no kind of engine."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
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


class WeightSource(Protocol):
    """Where a replica finds weights: a relay's `Puller`, or one folder."""

    def latest(self) -> WeightVersion | None:
        """The newest complete version; None before the first."""
        ...

    def lease(self, version: WeightVersion) -> AbstractContextManager[Path]:
        """Hold a version's folder while it is read or mapped."""
        ...


StartEngine = Callable[[Path, WeightVersion], Awaitable[tuple[EngineHandle, EngineClient]]]
"""Starts an engine on a folder of weights; ready when it returns."""
