"""Ray: starts it or joins it, places role processes by a deadline, and carries their calls.

Ray carries no trajectories and no weights. Its own restarts stay off; the supervisor restarts.
"""

import asyncio
import importlib
import logging
import os
from collections.abc import Coroutine
from dataclasses import replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray._private import ray_constants
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laminar.allocator import exempt_from_collection, keep_freed_memory
from laminar.cluster.housekeeping import LOG_BYTES, OLD_LOGS
from laminar.cluster.roles import RUN_ID_VARIABLE, RoleContext, RoleSpec
from laminar.config.load import append_user_modules
from laminar.config.root import LaminarConfig
from laminar.errors import ConfigError, DeadlineError, EnvironmentSetupError, LaminarError, reason

LOOPBACK = "127.0.0.1"
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

OBJECT_STORE_BYTES = 80 * 1024**2
"""Ray's smallest object store: no data of ours passes through it."""


def living_nodes() -> list[str]:
    """Ids of the machines of the cluster that is joined."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


class RoleDiedError(LaminarError):
    """A role's process ended, or failed in a way that only a restart may mend."""


class RayCluster:
    """A started or joined Ray cluster."""

    def __init__(self, address: str, num_cpus: int, run_id: str, scratch: Path) -> None:
        self._is_local = local = address == "local"
        os.environ.update(
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
            RAY_worker_niceness="0",  # the roles are the job, not a background task (Ray's default is 15)
        )
        options: dict[str, Any] = {"namespace": run_id, "log_to_driver": False, "logging_level": logging.ERROR}
        if local:
            _keep_ray_on_loopback()
            options |= {
                "num_cpus": max(num_cpus, os.cpu_count() or 1),
                "include_dashboard": False,
                "_temp_dir": str(scratch),
                "_node_ip_address": LOOPBACK,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        try:
            ray.init(address=address, **options)
        except (ConnectionError, ray.exceptions.RaySystemError) as error:
            raise EnvironmentSetupError(
                f"cluster.ray_address {address!r} does not answer ({reason(error)}); start Ray there, or use 'local'"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"cluster.ray_address {address!r} is no address ({reason(error)}); write 'local', 'auto', or a host:port"
            ) from error

    def free(self) -> tuple[float, float]:
        """Cores and GPUs that no role uses. A local Ray is told of more CPUs than there are: this machine's cores count."""
        left, cores = ray.available_resources(), 0.0
        if self._is_local:
            cores = len(os.sched_getaffinity(0)) - ray.cluster_resources().get("CPU", 0.0)
        return cores + left.get("CPU", 0.0), left.get("GPU", 0.0)

    def stop(self) -> None:
        """Leave the cluster; a local one ends."""
        ray.shutdown()


def _keep_ray_on_loopback() -> None:
    """Let a local Ray listen on loopback only: who reaches one of its ports can run code.

    Its servers do so where the node's address is 127.0.0.1 (with any other, 127.0.0.2 for one, they listen on every network
    card); but Ray replaces that by the card's address unless it is told, by this switch, that no cluster is wanted.
    """
    os.environ[CLUSTERS] = "0"  # for Ray's own processes and the roles
    ray_constants.ENABLE_RAY_CLUSTER = False  # for this one, which has read the switch already


class RoleProcess:
    """One placed role."""

    def __init__(self, spec: RoleSpec, context: RoleContext, config: LaminarConfig) -> None:
        self.spec = spec
        self.pid, self.node_id = 0, ""
        threads = str(spec.num_threads)
        environment = {
            RUN_ID_VARIABLE: context.run_id,
            "PYTHONSAFEPATH": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads),
            **spec.environment,
        }
        strategy = NodeAffinitySchedulingStrategy(spec.node_id, soft=spec.is_wish) if spec.node_id else "DEFAULT"
        actor = _REMOTE_ROLE.options(
            name=f"{spec.name}-{os.urandom(3).hex()}",
            num_cpus=spec.num_cpus,
            num_gpus=spec.num_gpus,
            max_restarts=0,
            max_concurrency=64,
            runtime_env={"env_vars": environment},
            scheduling_strategy=strategy,
        )
        self._actor = actor.remote(spec, context, config)

    async def place(self, seconds: float) -> None:
        """Wait until Ray has started the process; `pid` is its id, `node_id` the machine.

        Raises:
            EnvironmentSetupError: if Ray finds no room for it in time.
            RoleDiedError: if the process could not be started.
        """
        try:
            async with asyncio.timeout(seconds):
                self.pid, self.node_id = await self._actor.whereabouts.remote()
        except ray.exceptions.RayError as error:
            raise RoleDiedError(f"the process of {self.spec.name} did not start: {_last_line(reason(error))}") from None
        except TimeoutError:
            raise EnvironmentSetupError(
                f"Ray found no room for {self.spec.name} ({self.spec.num_cpus:g} CPUs, {self.spec.num_gpus:g} GPUs) in "
                f"{seconds:g} s; lower the number of workers or ranks, or add machines"
            ) from None

    async def start(self, seconds: float) -> None:
        """Wait until the role is ready.

        Raises:
            DeadlineError: if it is not in time.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.call("start")
        except TimeoutError:
            raise DeadlineError(f"{self.spec.name} to start", seconds) from None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a coroutine method of the role.

        Raises:
            LaminarError: the role's own.
            RoleDiedError: its process ended, or it failed in a way that is no error of ours.
        """
        try:
            return await self._actor.call.remote(method, *arguments)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LaminarError):
                raise error.cause from None
            log = f"logs/{self.spec.name}.log"
            raise RoleDiedError(f"{self.spec.name} failed in {method}: {error.cause!r}; see {log}") from None
        except ray.exceptions.RayActorError:
            raise RoleDiedError(f"the process of {self.spec.name} ended") from None
        except ray.exceptions.RayError as error:  # killed for memory, its machine gone, ...
            raise RoleDiedError(f"the process of {self.spec.name} ended: {_last_line(reason(error))}") from None

    def kill(self) -> None:
        """End the process at once."""
        ray.kill(self._actor)


class _RoleActor:
    """Runs inside the placed process: opens the log, imports the role, forwards calls."""

    def __init__(self, spec: RoleSpec, context: RoleContext, config: LaminarConfig) -> None:
        log = RotatingFileHandler(context.run_folder / "logs" / f"{spec.name}.log", maxBytes=LOG_BYTES, backupCount=OLD_LOGS)
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(handlers=[log], level=logging.INFO, format=form, force=True)
        keep_freed_memory()
        append_user_modules(config.run.config_directory)
        module, _, name = spec.target.partition(":")
        node_id = ray.get_runtime_context().get_node_id()[:12]
        address = ray.util.get_node_ip_address()
        role = getattr(importlib.import_module(module), name)
        self._role = role(replace(context, role=spec.name, node_id=node_id, node_address=address), config, **spec.arguments)
        self._logger = logging.getLogger(f"laminar.{spec.name}")
        exempt_from_collection()

    async def whereabouts(self) -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def call(self, method: str, *arguments: Any) -> Any:
        coroutine: Coroutine[Any, Any, Any] = getattr(self._role, method)(*arguments)
        try:
            return await coroutine
        except (Exception, asyncio.CancelledError):
            self._logger.exception("%s failed", method)
            raise


_REMOTE_ROLE = ray.remote(_RoleActor)
"""Made once: Ray keeps every class that it is given, here and in the cluster, as long as the run lives."""


def _last_line(text: str) -> str:
    return text.splitlines()[-1]
