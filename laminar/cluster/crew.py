"""The crew: every role of a run, started, kept alive within a budget of restarts, and stopped.

A dead worker or relay is restarted alone. A dead trainer rank takes all ranks along; they restart together from the newest
checkpoint and the replay spool, under a new lineage. Errors that a restart cannot mend (a wrong setting, a missing resource,
or a run that gave up) end the run at once with their own sentence.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from laminar.cluster.ray_cluster import RoleDiedError, RoleProcess
from laminar.cluster.relays import Relays
from laminar.cluster.roles import RoleContext, RoleSpec, manager_spec, rollout_spec, trainer_specs
from laminar.config.root import LaminarConfig
from laminar.errors import FATAL_ERRORS, LaminarError, RunFailedError, first_error
from laminar.telemetry.stream import TelemetryWriter

logger = logging.getLogger("laminar.supervisor")

STOP_SECONDS = 20.0
"""How long an orderly stop may take before the rest is killed."""
MANAGER_START_SECONDS = 90.0


class Crew:
    """All roles of one life of a run."""

    def __init__(
        self,
        config: LaminarConfig,
        context: RoleContext,
        telemetry: TelemetryWriter,
        say: Callable[[str], None],
        note_process: Callable[[str, int | None], None],
    ) -> None:
        self._config, self._context, self._telemetry, self._say = config, context, telemetry, say
        self._note_process = note_process
        self._workers: dict[int, RoleProcess] = {}
        self._workers_changed = asyncio.Condition()
        self._retired: set[str] = set()
        self._keepers: dict[int, asyncio.Task[Any]] = {}
        self._ranks: list[RoleProcess] = []
        self._trainer_ended = asyncio.Event()
        self._trainer_ended.set()
        self._master_node = ""
        self._relays = Relays(self._keep, self._process, self._start, config.relay.num_gpus)
        self._manager: RoleProcess | None = None
        self.restarts: Counter[str] = Counter()
        self.is_stopping = False

    async def keep_relays(self) -> None:
        """Run a relay on every machine that trains or runs engines, until cancelled."""
        await self._relays.run()

    async def keep_manager(self) -> None:
        """Run the rollout manager until cancelled."""
        await self._keep("manager", self._run_manager)

    async def keep_worker(self, index: int, first_evaluation: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run one worker until cancelled.

        Args:
            index: which one.
            first_evaluation: run with the version the worker starts on, before it can swap; once.
        """
        self._retired.discard(f"rollout-{index}")
        keeper = asyncio.current_task()
        assert keeper is not None
        self._keepers[index] = keeper

        async def life() -> None:
            await self._run_worker(index, first_evaluation if not self.restarts[f"rollout-{index}"] else None)

        await self._keep(f"rollout-{index}", life)

    async def retire_worker(self, index: int) -> None:
        """Stop one worker in order: it gives its groups back to the pool; it is not restarted. `keep_worker` may follow.

        The task that keeps it ends, also while the worker starts or is between two lives.
        """
        name = f"rollout-{index}"
        self._retired.add(name)
        worker = self._workers.get(index)
        if worker is not None:
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await worker.call("stop")
            except (LaminarError, TimeoutError) as error:
                logger.info("retiring %s: %s", name, error)
            worker.kill()
        if (keeper := self._keepers.pop(index, None)) is not None:
            keeper.cancel()
            if (await asyncio.wait([keeper], timeout=STOP_SECONDS))[1]:
                logger.warning("retiring %s: its keeper has not ended within %g s", name, STOP_SECONDS)
        await self._tell_retired(name)

    async def train(self) -> dict[str, Any]:
        """The trainer's lives, one after another, until one ends in order.

        Returns:
            rank 0's closing words: `reason`, `step`.
        """
        result: dict[str, Any] = {}

        async def life() -> None:
            nonlocal result
            result = await self._run_trainer()

        await self._keep("trainer", life)
        for spec in trainer_specs(self._config, ""):
            await self._tell_retired(spec.name)
        return result

    async def evaluate(self, prompts: list[bytes], min_number: int, wait_seconds: float) -> Any:
        """Have one worker answer held-out prompts with a version of at least this number, awaited so long."""
        async with asyncio.timeout(2 * wait_seconds + self._config.eval.timeout_seconds):  # its own deadlines come first
            async with self._workers_changed:
                await self._workers_changed.wait_for(lambda: bool(self._workers))
            worker = self._workers[min(self._workers)]
            return await worker.call("evaluate", prompts, min_number, wait_seconds)

    async def limit_in_flight(self, num_groups: int) -> None:
        """Let workers play at most so many groups at once, from now on and after their restarts."""
        rollout = self._config.rollout.model_copy(update={"max_in_flight_groups": num_groups})
        self._config = self._config.model_copy(update={"rollout": rollout})
        for worker in list(self._workers.values()):
            with contextlib.suppress(RoleDiedError):  # the one that takes its place is started with the new limit
                await worker.call("limit_in_flight", num_groups)

    async def stop_training(self) -> None:
        """Ask the trainer to finish its step, save and return."""
        self.is_stopping = True
        if self._ranks:
            await self._ranks[0].call("stop")

    async def save_and_end(self) -> bool:
        """`stop_training`, and wait until the trainer's life has ended; whether there was one."""
        had_trainer = bool(self._ranks)
        await self.stop_training()
        await self._trainer_ended.wait()
        return had_trainer

    async def stop(self) -> None:
        """Stop workers and relays in order; what does not obey in time is killed with the rest."""
        self.is_stopping = True
        ends = [(role, "stop") for role in self._workers.values()]
        ends += [(self._manager, "stop")] if self._manager is not None else []
        ends += [(role, "remove") for role in self._relays.processes()]
        for role, method in ends:
            try:
                async with asyncio.timeout(STOP_SECONDS / 4):
                    await role.call(method)
            except (LaminarError, TimeoutError) as error:
                logger.info("stopping %s: %s", role.spec.name, error)
        for process in (*(role for role, _ in ends), *self._ranks):
            process.kill()
            await self._tell_retired(process.spec.name)

    async def _tell_retired(self, role: str) -> None:
        """A role that ended in order is not silent, it is gone."""
        self._note_process(role, None)
        await self._telemetry.emit("retired", fields={"role": role})

    async def _keep(self, role: str, life: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run lives of a role until one returns in order or the budget is used up."""
        while True:
            try:
                return await life()
            except FATAL_ERRORS:
                raise
            except LaminarError as error:
                if self.is_stopping or role in self._retired:
                    return None
                self.restarts[role] += 1
                if self.restarts[role] > self._config.run.max_restarts:
                    raise RunFailedError(
                        f"{role} was restarted {self._config.run.max_restarts} times; last: {error}"
                    ) from error
                self._say(f"{role}: {error}; restarting it ({self.restarts[role]})")
                await self._telemetry.emit(
                    "notice", {f"faults/restarts_{role}": self.restarts[role]}, fields={"text": f"{role} restarted: {error}"}
                )

    def _process(self, spec: RoleSpec) -> RoleProcess:
        return RoleProcess(spec, self._context, self._config)

    async def _place(self, process: RoleProcess) -> None:
        await process.place(self._config.cluster.placement_seconds)
        self._note_process(process.spec.name, process.pid)

    async def _start(self, process: RoleProcess, seconds: float) -> None:
        await self._place(process)
        await process.start(seconds)

    async def _run_manager(self) -> None:
        self._manager = self._process(manager_spec())
        try:
            await self._start(self._manager, MANAGER_START_SECONDS)
            await self._manager.call("run")
        finally:
            self._manager.kill()

    async def _run_worker(self, index: int, first_evaluation: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        worker = self._process(rollout_spec(self._config, index))
        start_seconds = self._config.rollout.engine.start_seconds + self._config.run.no_progress_seconds
        try:
            await self._place(worker)
            await self._relays.need(worker.node_id)
            await worker.start(start_seconds)
            async with self._workers_changed:
                self._workers[index] = worker
                self._workers_changed.notify_all()
            async with asyncio.TaskGroup() as group:
                if first_evaluation:
                    group.create_task(first_evaluation())
                    await asyncio.sleep(0)  # its call goes out first: it holds the swap before `run` can make one
                await worker.call("run")
        except* LaminarError as failures:
            raise first_error(failures) from None
        finally:
            self._workers.pop(index, None)
            worker.kill()

    async def _run_trainer(self) -> dict[str, Any]:
        specs = trainer_specs(self._config, secrets.token_hex(8), self._master_node)
        self._ranks = [self._process(spec) for spec in specs]
        self._trainer_ended.clear()
        try:
            async with asyncio.TaskGroup() as group:
                for rank in self._ranks:
                    group.create_task(self._place(rank))
            self._master_node = self._ranks[0].node_id
            await self._relays.lead(self._master_node)  # the trainer publishes into its store
            async with asyncio.TaskGroup() as group:
                for rank in self._ranks:
                    group.create_task(rank.start(self._config.trainer.start_seconds))
            async with asyncio.TaskGroup() as group:
                for rank in self._ranks:
                    group.create_task(rank.call("restore"))  # its deadline is that of progress: each replayed step is told
            async with asyncio.TaskGroup() as group:
                runs = [group.create_task(rank.call("run")) for rank in self._ranks]
            return dict(runs[0].result())
        except* LaminarError as failures:
            raise first_error(failures) from None
        finally:
            for rank in self._ranks:
                rank.kill()
            self._ranks = []
            self._trainer_ended.set()
        raise AssertionError("unreachable")
