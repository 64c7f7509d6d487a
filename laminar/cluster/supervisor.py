"""The supervisor: one life of a run, from the first service to the last process.

Order of starting: sentinel, prompts, Redis, Ray, then all roles at once: workers wait for the version that the trainer
publishes first. Stopping undoes it in reverse, by the same path whether the run ended, failed, or was told to end.
Every wait has a deadline. What an order to stop does, and when, is `stopping`'s.

It names roles by import string and knows nothing of models, engines or losses.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import redis.exceptions

from laminar.cluster.children import Child, keep_children
from laminar.cluster.control_desk import Action, ControlDesk
from laminar.cluster.crew import STOP_SECONDS, Crew
from laminar.cluster.dashboard_process import DashboardProcess
from laminar.cluster.data import RunData, load_run_data
from laminar.cluster.data_keeper import DataKeeper
from laminar.cluster.diagnosis import diagnose
from laminar.cluster.evaluation import Evaluations
from laminar.cluster.housekeeping import Housekeeper
from laminar.cluster.hub import with_local_model
from laminar.cluster.live_settings import LiveSettings
from laminar.cluster.observer_process import ObserverProcess
from laminar.cluster.processes import end_processes
from laminar.cluster.ray_cluster import RayCluster
from laminar.cluster.roles import RUN_ID_VARIABLE, RoleContext, cpus_needed
from laminar.cluster.scaling import SPARE_WORKERS, Scaling
from laminar.cluster.sentinel import Sentinel
from laminar.cluster.stopping import Phase, Stopping, what_follows
from laminar.cluster.usage import UsageMeter
from laminar.config.root import LaminarConfig
from laminar.control import Verb, forget_requests
from laminar.errors import ConfigError, LaminarError, RunFailedError, first_error
from laminar.experience.client import check_server, connect
from laminar.experience.server import EmbeddedServer
from laminar.run_folder import RunFolder, RunState
from laminar.telemetry.files import MetricsFile
from laminar.telemetry.follower import Follower
from laminar.telemetry.observer import settle
from laminar.telemetry.stream import Event, TelemetryReader, TelemetryWriter
from laminar.telemetry.view import RunView

T = TypeVar("T")

logger = logging.getLogger("laminar.supervisor")
UNEXPECTED = "an error that nobody expected; the output of the run, or logs/supervisor.log, has it"

SIGNALS = (signal.SIGINT, signal.SIGTERM)
USE_SECONDS = 2.0
PROGRESS_SECONDS = 1.0
CANCEL_SECONDS = 1.0
ANSWER_FIRST_SECONDS = 0.3
"""Between the order to end at once and its obeying, so that it is answered."""


@dataclass(slots=True)
class Outcome:
    """How a life ended, and what its closing report needs."""

    folder: RunFolder
    view: RunView
    status: str = "failed"
    reason: str = UNEXPECTED
    peak_resident_bytes: int = 0
    restarts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class Supervisor:
    """Runs one life of a run."""

    def __init__(
        self,
        config: LaminarConfig,
        folder: RunFolder,
        config_folder: Path,
        life_lock: int,
        on_event: Callable[[Event, RunView], None],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._folder, self._config_folder = config, folder, config_folder
        self._life_lock = life_lock
        self._on_event, self._say = on_event, say
        self._is_giving_up = False
        self._server: EmbeddedServer | None = None
        self._children: dict[str, Child] = {}
        self.outcome = Outcome(folder, RunView(config.run.max_steps))
        self._stopping = Stopping(folder, self.outcome.view, self._cancel)

    async def run(self) -> Outcome:
        """Start, watch, stop.

        Raises:
            LaminarError: the run failed; everything it started is gone.
        """
        started, state = time.monotonic(), self._begin_life()
        try:
            async with AsyncExitStack() as stack:
                data, context = await self._start_services(stack, state)
                await self._live(data, context)
        except LaminarError as error:
            self.outcome.status, self.outcome.reason = "failed", str(error)
            raise
        except asyncio.CancelledError:
            if self.outcome.status != "finished":
                self.outcome.status = "stopped"
                self.outcome.reason = self._stopping.reason or self.outcome.reason
            raise
        finally:
            self.outcome.seconds = time.monotonic() - started
            status, reason = self.outcome.status, self.outcome.reason
            self._tell_state(status=status, reason=reason, redis_url="", dashboard_url="", roles={})
            for number in SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
        return self.outcome

    def _begin_life(self) -> RunState:
        """Mark the run as starting; its id and token stay the same over all lives."""
        try:
            old = self._folder.read_state()
            run_id, token, lives = old.run_id, old.token, old.lives + 1
        except FileNotFoundError:
            run_id, token, lives = self._folder.path.name, secrets.token_hex(16), 1
        os.environ[RUN_ID_VARIABLE] = run_id
        wanted = self._config.rollout.num_workers
        return self._folder.write_state(
            RunState(run_id, token, os.getpid(), "starting", started_at=time.time(), lives=lives, wanted_workers=wanted)
        )

    async def _start_services(self, stack: AsyncExitStack, state: RunState) -> tuple[RunData, RoleContext]:
        """Signals, sentinel, prompts, Redis, Ray: each is undone in reverse order when the stack unwinds."""
        self._catch_signals()
        scratch = f"/tmp/laminar-ray-{state.token[:8]}"
        folders = [str(Path(self._config.relay.root) / f"laminar-{state.run_id}-*"), scratch]
        sentinel = Sentinel(state.run_id, folders, self._life_lock)
        stack.callback(sentinel.dismiss)
        self._children["sentinel"] = sentinel
        stack.callback(end_processes, state.run_id, STOP_SECONDS)

        self._serve_dashboard(stack)
        self._config = await abandonable(with_local_model, self._config)
        data = await abandonable(load_run_data, self._config, self._config_folder)
        self._say(f"{len(data.prompts)} prompts" + (f", {len(data.held_out)} held out" if data.held_out else ""))
        url = self._config.experience.redis_url
        if url == "embedded":
            self._server = EmbeddedServer(self._folder.redis)
            await asyncio.to_thread(self._server.start)
            stack.callback(self._server.stop)
            url = self._server.url
        self._redis = await connect(url)
        stack.push_async_callback(self._redis.aclose)
        await check_server(self._redis)
        await data.put_into_pool(self._redis, state.run_id, self._config)
        await forget_requests(self._redis, state.run_id)
        self._folder.update_state(redis_url=url)

        self._say("starting Ray")
        num_cpus = cpus_needed(self._config) + SPARE_WORKERS * self._config.rollout.engine.num_threads
        try:
            self._cluster = RayCluster(self._config.cluster.ray_address, num_cpus, state.run_id, Path(scratch))
        except SystemExit:  # Ray's own answer to a signal that comes while it starts
            self._on_signal(signal.SIGTERM)
            raise asyncio.CancelledError from None
        stack.callback(self._cluster.stop)
        self._catch_signals()  # again, for Ray puts its own handler in place
        context = RoleContext("supervisor", state.run_id, state.token, url, self._folder.path.resolve())
        return data, context

    def _serve_dashboard(self, stack: AsyncExitStack) -> None:
        if self._config.dashboard.enabled:
            log = self._folder.logs / "dashboard.log"
            dashboard = DashboardProcess(self._config.dashboard, self._folder.path, log)
            stack.callback(dashboard.stop)
            self._folder.update_state(dashboard_url=dashboard.url)
            self._children["dashboard"] = dashboard
            self._note_process("dashboard", dashboard.pid)
            self._say(f"dashboard: {dashboard.url}")

    def _catch_signals(self) -> None:
        main = asyncio.current_task()
        assert main is not None
        self._main = main
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _cancel(self, after_seconds: float) -> None:
        if after_seconds:
            asyncio.get_running_loop().call_later(after_seconds, self._main.cancel)
        else:
            self._main.cancel()

    def _on_signal(self, number: signal.Signals) -> None:
        self._say(f"{number.name}: {self._stopping.tell()}")

    async def _stop_by_request(self, arguments: Mapping[str, str]) -> str:
        """`stop`: in order, or at once (without a checkpoint)."""
        how = arguments.get("how", "drain")
        if how not in ("drain", "now"):
            raise ConfigError(f"stop {how!r} is not known; say drain or now")
        return (self._stopping.cut if how == "now" else self._stopping.tell)(ANSWER_FIRST_SECONDS)

    async def _live(self, data: RunData, context: RoleContext) -> None:
        """Run all roles until the trainer is done; then stop them."""
        view = self.outcome.view
        telemetry = TelemetryWriter(self._redis, context.run_id, "supervisor")
        reader = TelemetryReader(self._redis, context.run_id)
        metrics = MetricsFile(self._folder.metrics)
        await settle(reader, metrics)
        await reader.begin(after=metrics.last_event)
        self._say(f"starting the trainer and {self._config.rollout.num_workers} rollout worker(s)")
        crew = Crew(self._config, context, telemetry, self._say, self._note_process)
        self.outcome.restarts = crew.restarts
        held_out = data.encoded_held_out()
        evaluations = Evaluations(self._config, held_out, self._folder.metrics, crew, telemetry, self._say)

        def take(event: Event) -> None:
            if event.kind == "restored":
                evaluations.rewind(int(event.fields["step"]))
            self._on_event(event, view)

        follower = Follower(reader, view, metrics.last_step, take)
        observer = ObserverProcess(
            self._folder.path, self._folder.logs / "observer.log", crew.restarts, self._note_process, telemetry
        )
        keeper = DataKeeper(
            self._server, self._redis, data, context.run_id, self._config, crew.restarts, telemetry, self._say
        )
        live = LiveSettings(self._config, self._folder, self._redis, context.run_id, data, keeper, crew)
        scaling = Scaling(self._config.rollout, crew, telemetry, self._say, self._note_wanted, self._cluster.free)
        actions: dict[Verb, Action] = {
            Verb.STOP: self._stop_by_request, Verb.PAUSE: live.pause, Verb.UNPAUSE: live.unpause, Verb.SET: live.set,
            Verb.SCALE: scaling.change,
        }  # fmt: skip
        desk = ControlDesk(self._redis, context.run_id, context.token, actions, telemetry, self._say)
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(follower.run()),
                    group.create_task(observer.run()),
                    group.create_task(self._measure_use(context.run_id, telemetry)),
                    group.create_task(crew.keep_relays()),
                    group.create_task(keeper.run()),
                    group.create_task(desk.run()),
                    group.create_task(scaling.run()),
                    group.create_task(self._housekeeper(telemetry).run()),
                    group.create_task(keep_children(self._children, crew.restarts, telemetry)),
                    group.create_task(evaluations.run()),
                ]
                await self._train(crew, evaluations, follower, live, group, background)
                self._stopping.phase = Phase.ENDING
                await crew.stop()
                await cancel_all(background)
        except* LaminarError as failures:
            error = first_error(failures)
            await telemetry.emit("alert", fields={"name": "run_failed", "text": f"the run gave up: {error}"})
            raise error from None
        finally:
            self._stopping.phase = Phase.ENDING
            with contextlib.suppress(redis.exceptions.RedisError):
                await follower.drain()
            if not await observer.end():
                await self._write_what_is_left(context)

    def _housekeeper(self, telemetry: TelemetryWriter) -> Housekeeper:
        disks = [self._folder.path, Path(self._config.relay.root)]
        return Housekeeper([self._folder.logs, self._folder.redis], disks, telemetry, self._say)

    async def _write_what_is_left(self, context: RoleContext) -> None:
        """The observer did not end in order: its last lines are written here, for the report needs them."""
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            await settle(TelemetryReader(self._redis, context.run_id), MetricsFile(self._folder.metrics))

    async def _train(
        self,
        crew: Crew,
        evaluations: Evaluations,
        follower: Follower,
        live: LiveSettings,
        group: asyncio.TaskGroup,
        background: list["asyncio.Task[None]"],
    ) -> None:
        """Training and the evaluations around it; a stop signal cuts it short in order."""
        self._folder.update_state(status="running")
        self._stopping.phase = Phase.TRAINING
        training = group.create_task(crew.train())
        progress = group.create_task(self._watch_progress(crew, follower, live))
        for index in range(self._config.rollout.num_workers):
            evaluation = evaluations.evaluate_start if evaluations.wants_start and index == 0 else None
            background.append(group.create_task(crew.keep_worker(index, evaluation)))
        stopping = group.create_task(self._stopping.is_told.wait())
        await asyncio.wait([training, stopping], return_when=asyncio.FIRST_COMPLETED)
        if self._is_giving_up:
            await progress  # raises why
        if not training.done():
            progress.cancel()
            await self._stop_training(crew, training)
            return
        progress.cancel()
        result = training.result()
        self.outcome.status, self.outcome.reason = "finished", str(result.get("reason", ""))
        self._stopping.phase = Phase.EVALUATING
        evaluating = group.create_task(evaluations.finish(int(result["step"])))
        await asyncio.wait([evaluating, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not evaluating.done():
            self.outcome.reason += "; told to stop before the last evaluation had ended"
        evaluating.cancel()
        stopping.cancel()

    async def _stop_training(self, crew: Crew, training: "asyncio.Task[dict[str, Any]]") -> None:
        self._tell_state(status="stopping")
        self.outcome.status = "stopped"
        how = "told to stop"
        step = self.outcome.view.step
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await crew.stop_training()
                result = await asyncio.shield(training)
            step = int(result.get("step", step))
        except (TimeoutError, LaminarError) as error:
            how += f", and the step did not end in order ({str(error) or f'{STOP_SECONDS:g} s were too short'})"
            training.cancel()
        self.outcome.reason = f"{how}; {what_follows(step, self._folder.saved_step())}"

    def _note_process(self, role: str, pid: int | None) -> None:
        """A role has this process now; None: it has ended in order."""
        with contextlib.suppress(OSError):
            roles = {**self._folder.read_state().roles, role: pid}
            self._tell_state(roles={name: known for name, known in roles.items() if known is not None})

    def _note_wanted(self, num_workers: int) -> None:
        self._tell_state(wanted_workers=num_workers)

    def _tell_state(self, **changes: Any) -> None:
        """Note what `status` shows; a full disk must neither end a run for it nor hide why one ended."""
        try:
            self._folder.update_state(**changes)
        except OSError as error:
            logger.warning("state.json cannot be written: %s", error)

    async def _measure_use(self, run_id: str, telemetry: TelemetryWriter) -> None:
        """Tell what the run takes of this machine, and track the peak of its memory."""
        meter = UsageMeter(run_id, Path(self._config.relay.root))
        while True:
            try:
                metrics = await asyncio.to_thread(meter.measure, self._folder.read_state().roles)
            except OSError as error:
                logger.info("what the run takes of this machine cannot be measured: %s", error)
            else:
                used = int(metrics["system/host_memory_bytes"])
                self.outcome.peak_resident_bytes = max(self.outcome.peak_resident_bytes, used)
                await telemetry.emit("system", metrics)
            await asyncio.sleep(USE_SECONDS)

    async def _watch_progress(self, crew: Crew, follower: Follower, live: LiveSettings) -> None:
        """End a run in which no step ends for too long, saying who waits for what."""
        limit = self._config.run.no_progress_seconds
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            if live.is_paused:
                follower.last_progress = time.monotonic()
            if time.monotonic() - follower.last_progress > limit:
                raise RunFailedError(await self._give_up(crew, follower, limit))

    async def _give_up(self, crew: Crew, follower: Follower, limit: float) -> str:
        """Write down who waits for what, let the trainer save what it has, and say so."""
        self._is_giving_up = True
        waits, saved, where = follower.view.trainer_wait or "nothing that it named", "the last checkpoint stands", ""
        with contextlib.suppress(OSError):
            where = f"; see {await diagnose(self._folder, self._redis, self._folder.path.name, follower.view, limit)}"
        with contextlib.suppress(LaminarError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                if await crew.save_and_end():
                    saved = "a checkpoint was saved"
        return f"no step ended for {limit:g} s; the trainer waits for {waits}; {saved}{where}"


async def abandonable(work: Callable[..., T], *arguments: Any) -> T:
    """As `asyncio.to_thread`, for what may take long (a download): nobody waits for its thread once this is cancelled."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="start", daemon=True).start()
    return await asyncio.wrap_future(future)


async def cancel_all(tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Cancel until all are done: a Redis client that is connecting anew has been seen to swallow a cancellation."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_SECONDS)
