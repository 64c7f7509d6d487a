"""Starting a worker's engine process, by kind, and making sure that it holds what it should."""

from contextlib import AsyncExitStack
from pathlib import Path

from laminar.cluster.roles import RoleContext
from laminar.config.root import LaminarConfig
from laminar.types import WeightVersion
from rollout.engine_handle import EngineHandle, StartEngine
from rollout.engines.client import EngineClient
from rollout.engines.launch import EngineKind, EngineLaunch, Flag, engine_kind
from rollout.engines.pinned_load import PinnedLoad
from rollout.engines.process import EngineProcess
from rollout.quarantine import RejectedWeightsError
from rollout.verification import verify


def engine_starter(context: RoleContext, config: LaminarConfig) -> StartEngine:
    """A function that starts the configured engine on a folder of weights and waits until it answers with their version."""
    engine = config.rollout.engine
    kind = engine_kind(engine.kind)
    options = engine_options(config, kind)
    pinned = None
    if engine.weight_load == "pinned":
        request = context.run_folder / "logs" / f"{context.role}-weights.json"
        pinned = PinnedLoad(request.resolve(), engine.tensor_parallel_size)

    async def start(path: Path, version: WeightVersion) -> tuple[EngineHandle, EngineClient]:
        process = EngineProcess(
            EngineLaunch(
                model=path,
                version=version,
                token=context.token,
                run_id=context.run_id,
                log=context.run_folder / "logs" / f"{context.role}-engine.log",
                kind=engine.kind,
                python=engine.python,
                dtype=config.model.dtype,
                max_running=engine.max_running,
                max_cached_tokens=engine.max_cached_tokens,
                num_threads=engine.num_threads,
                num_gpus=engine.num_gpus,
                tensor_parallel_size=engine.tensor_parallel_size,
                options=options,
                weights_request=None if pinned is None else pinned.request,
            )
        )
        url = await process.start(engine.start_seconds)
        client = EngineClient(
            url,
            token=context.token,
            run_id=context.run_id,
            version=version,
            swap=engine.swap,
            first_weights=None if kind.checks_weights else path,
            reads_back=kind.reads_back,
            pinned=pinned,
            request_seconds=engine.request_seconds,
        )
        async with AsyncExitStack() as undo:
            undo.push_async_callback(process.kill)
            undo.push_async_callback(client.close)
            verdict = await verify(client, path, version, engine.probe_tolerance)
            if not verdict.is_accepted:
                raise RejectedWeightsError(verdict)
            undo.pop_all()
        return process, client

    return start


def engine_options(config: LaminarConfig, kind: EngineKind) -> dict[str, Flag]:
    """The flags of `[rollout.engine.options]`, with what the kind and we add."""
    options = kind.flags(config.rollout.engine.options)
    if config.rollout.engine.kind == "torch" and config.staleness.bound == 0:
        options.setdefault("batch-invariant", True)  # on-policy runs repeat bit by bit (DESIGN section 4, rule 9)
    return options
