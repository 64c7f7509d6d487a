"""Plays environments of the package `verifiers` (0.4, `verifiers.v1`): its harness calls our gateway, its task scores.

Invariants: what the package records as an error, or leaves unscored, is a failure with its kind, never a reward; the
environment's shared servers live as long as the worker. The trajectory's key goes as the model's name, since the package
keeps one HTTP client for each endpoint and never lets one go.
It does not know tokens: they are recorded where the calls arrive.
"""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from laminar.errors import ConfigError, reason
from laminar.types import FailureKind
from rollout.boundary import EpisodeError
from rollout.drivers import Task
from rollout.environments.verifiers import Verifiers

_KINDS = {
    "ProviderError": FailureKind.ENGINE,
    "ToolsetError": FailureKind.TOOL,
    "EnvError": FailureKind.ENVIRONMENT,
    "HarnessError": FailureKind.ENVIRONMENT,
    "SandboxError": FailureKind.ENVIRONMENT,
    "InterceptionError": FailureKind.ENVIRONMENT,
    "TunnelError": FailureKind.ENVIRONMENT,
}
"""By the package's type of error; `TaskError` depends on what the task was at."""

_CLOSE_SECONDS = 10.0


class VerifiersDriver:
    """Runs one environment, many episodes at once.

    Args:
        options: which environment.
        max_turns: most turns of its agent, unless the options set one; None: as many as it wants.
    """

    def __init__(self, options: Verifiers.Options, max_turns: int | None = None) -> None:
        self._options = options
        self._environment = load_environment(options.env, max_turns)
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._end = asyncio.Event()

    def place(self) -> AbstractAsyncContextManager[None]:
        """None is needed."""
        return nullcontext()

    async def run(self, task: Task) -> dict[str, float]:
        """Play one episode; its rewards by name, weighted.

        Raises:
            EpisodeError: the episode failed, or several of its agents are trained.
        """
        import verifiers.v1 as vf

        await self._serve()
        client = vf.EvalClientConfig(base_url=task.base_url, api_key_var="LAMINAR_GATEWAY_KEY")
        context = vf.ModelContext(model=task.api_key, client=client)
        return _rewards(await self._environment.run_episode(self._task(task), context))

    async def close(self) -> None:
        """End the shared servers, in bounded time."""
        if self._serving is not None:
            self._end.set()
            _, pending = await asyncio.wait({self._serving}, timeout=_CLOSE_SECONDS)
            for serving in pending:
                serving.cancel()

    def _task(self, task: Task) -> Any:
        data = task.prompt.fields.get(self._options.task_field)
        if data is None:
            text = f"prompt {task.prompt.prompt_id} has no column {self._options.task_field!r}; see rollout.verifiers_data"
            raise EpisodeError(FailureKind.USER_BUG, text)
        taskset = self._environment.taskset
        task_type = type(taskset).task_type()
        return task_type(task_type.data_type().model_validate(data), taskset.config.task)

    async def _serve(self) -> None:
        """Bring the shared servers up once; a task of their own holds them, so that whoever came first may be cancelled."""
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):  # a failure is not for ever
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._hold_servers(self._ready))
        await asyncio.shield(self._ready)

    async def _hold_servers(self, ready: "asyncio.Future[None]") -> None:
        try:
            async with self._environment.serving():
                ready.set_result(None)
                await self._end.wait()
        except Exception as error:  # the package's and its servers' own; whoever waits is told
            if ready.done():
                raise
            ready.set_exception(error)


def load_environment(env: dict[str, Any], max_turns: int | None = None) -> Any:
    """The package's environment.

    Raises:
        ConfigError: the package is missing, or refuses the settings.
    """
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ConfigError(
            f"environment `verifiers` needs its package: pip install laminar-rl[verifiers] ({error})"
        ) from error
    try:
        config = vf.resolve_env_config(env)
        if isinstance(config, vf.SingleAgentEnvConfig) and config.agent.max_turns is None:
            config.agent = config.agent.model_copy(update={"max_turns": max_turns})
        return vf.load_environment(config)
    except (ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise ConfigError(f"environment.options.env: verifiers refuses it: {reason(error)}") from error


def _rewards(episode: Any) -> dict[str, float]:
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok:
        raise _failure(episode, trained)
    if len(trained) != 1:
        text = f"{len(trained)} agents of the verifiers environment are trained; exactly one can be"
        raise EpisodeError(FailureKind.USER_BUG, text)
    (trace,) = trained
    if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
        raise EpisodeError(FailureKind.VERIFIER, f"verifiers left {', '.join(unscored)} unscored")
    return {name: reward.value for name, reward in trace.rewards.items()}


def _failure(episode: Any, traces: list[Any]) -> EpisodeError:
    """Why the episode failed; its own reasons before those of its agents."""
    if episode.is_timeout or any(trace.is_timeout for trace in traces):
        stopped = [trace.stop_condition for trace in traces if trace.is_timeout]
        return EpisodeError(FailureKind.TIMEOUT, f"a deadline of the verifiers environment passed ({stopped or 'episode'})")
    error = episode.last_error or next((trace.last_error for trace in episode.traces if not trace.ok), None)
    if error is None:
        return EpisodeError(FailureKind.ENVIRONMENT, "the verifiers episode failed without an error")
    kind = _KINDS.get(error.type, FailureKind.ENVIRONMENT)
    if error.type == "TaskError" and " scoring" in error.message:
        kind = FailureKind.VERIFIER
    return EpisodeError(kind, f"verifiers: {error.type}: {' '.join(error.message.split())[:300]}")
