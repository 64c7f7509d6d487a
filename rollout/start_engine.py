"""Starting a worker's engine process, by kind."""

from pathlib import Path

from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.types import WeightVersion
from rollout.engines.client import EngineClient
from rollout.engines.process import EngineProcess
from rollout.replica import StartEngine


def engine_starter(context: RoleContext, config: LaminarConfig) -> StartEngine:
    """A function that starts the configured engine on a folder of weights and waits until it is healthy."""

    async def start(path: Path, version: WeightVersion) -> tuple[EngineProcess, EngineClient]:
        raise NotImplementedError

    return start
