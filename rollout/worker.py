"""The rollout worker: claims groups, plays their episodes on one engine, submits, follows weights.

Its loops are independent: none waits for training, none waits for a broadcast. A rollout reads the last complete version on
its own machine. What limits it is admission (the staleness bound, the buffer's bytes) and its own in-flight limit.

It does not know how batches are made or weights are written.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis

from laminar.cluster.roles import RoleContext
from laminar.codec import decode_prompt
from laminar.config.rollout import RolloutConfig
from laminar.config.root import LaminarConfig
from laminar.errors import (
    DeadlineError,
    EngineError,
    ExperienceError,
    LaminarError,
    RelayError,
    RunFailedError,
    first_error,
)
from laminar.experience.answers import SubmitOutcome
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.partial import Partial, PartialPool
from laminar.experience.prompts import PromptPool
from laminar.experience.store import ExperienceStore
from laminar.telemetry.stream import TelemetryWriter
from laminar.types import ClaimedGroup, FailureKind, Purpose, Trajectory
from relay.puller import Puller, open_puller
from rollout.environments.factory import is_resumable
from rollout.evaluation import EvaluationResult, evaluate
from rollout.failures import FailureWindow
from rollout.journal import Journal
from rollout.player import Player
from rollout.recorder import PartialRecorder
from rollout.replica import Replica
from rollout.start_engine import engine_starter

logger = logging.getLogger("laminar.rollout.worker")

CONNECT_SECONDS = 60.0
CLAIM_PAUSE_SECONDS = 0.03
"""Pause after a claim that was refused."""
REPORT_SECONDS = 0.5
EVENT_WAIT_SECONDS = 5.0
"""One wait for news from the data module; shorter than its connections' deadline."""
VERSION_WAIT_SECONDS = 5.0
ENGINE_CHECK_SECONDS = 0.2
PROBE_SECONDS = 5.0


class RolloutWorker:
    """One replica's worker."""

    def __init__(self, context: RoleContext, config: LaminarConfig) -> None:
        self._context, self._config = context, config
        self._rollout = config.rollout
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._held: set[str] = set()
        self._stopping = asyncio.Event()
        self._left = asyncio.Event()
        self._evaluations_open = 0
        self._may_swap = asyncio.Event()
        self._may_swap.set()
        self._last_outcomes = FailureWindow(config.rollout.max_failure_ratio)
        self._failures: Counter[str] = Counter()
        self._num_ended = 0
        self._num_aborted = 0
        self._resumed_tokens = 0
        self._full_since: float | None = None
        self._producer_wait_seconds = 0.0
        self._tokens_of_dead_engines = 0
        self._engine_tokens = 0

    async def start(self) -> None:
        """Connect, wait for weights, start the engine."""
        client = await connect(self._context.redis_url, patience_seconds=CONNECT_SECONDS)
        player = Player(self._config, worker=self._context.role)
        puller = open_puller(self._config.relay, self._context.run_id, self._context.node_id)
        await puller.wait_newer(None, self._config.run.no_progress_seconds)  # the trainer may replay before it publishes
        replica = Replica(self._rollout.engine, puller, engine_starter(self._context, self._config))
        await self.equip(client, player, puller, replica)

    async def equip(self, client: Redis, player: Player, puller: Puller, replica: Replica) -> None:
        """Take its parts and start the engine; `start` makes the real ones."""
        self._redis, self._player, self._puller, self._replica = client, player, puller, replica
        self._store = ExperienceStore(client, self._context.run_id)
        self._pool, self._buffer = PromptPool(self._store), ExperienceBuffer(self._store)
        self._recorder = PartialRecorder(
            PartialPool(self._store),
            batch_tokens=self._config.experience.partial_tokens,
            is_resumable=is_resumable(self._config.environment),
        )
        self._telemetry = TelemetryWriter(client, self._context.run_id, self._context.role)
        await replica.start()

    async def run(self) -> None:
        """Work until stopped.

        Raises:
            RunFailedError: nearly every trajectory fails; carries the first error's text.
        """
        loops = [
            self._claim_groups(), self._follow_weights(), self._renew_leases(), self._follow_events(), self._keep_engine(),
            self._report(), self._recorder.run(),
        ]  # fmt: skip
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(loop) for loop in loops]
                self._group = group
                await self._stopping.wait()
                for task in [*tasks, *self._groups.values()]:
                    task.cancel()
        except* LaminarError as failures:
            raise first_error(failures) from None
        finally:
            await self._leave()

    async def stop(self) -> None:
        """Make `run` return, and wait until it has given its open groups back to the pool."""
        self._stopping.set()
        await self._left.wait()

    async def evaluate(self, prompts: list[bytes], min_number: int) -> EvaluationResult:
        """Answer held-out prompts with one version of at least this number; the next swap is held until the items end.

        Takes no slot of the staleness bound and writes nothing into the buffer.
        """
        await self._replica.wait_number(min_number, self._config.eval.timeout_seconds)
        async with asyncio.timeout(self._config.eval.timeout_seconds), self._hold_swap():
            await self._replica.wait_ready(self._rollout.engine.start_seconds)
            return await evaluate(self._player, self._replica, [decode_prompt(p) for p in prompts], self._config)

    @contextlib.asynccontextmanager
    async def _hold_swap(self) -> AsyncIterator[None]:
        self._evaluations_open += 1
        self._may_swap.clear()
        try:
            yield
        finally:
            self._evaluations_open -= 1
            if not self._evaluations_open:
                self._may_swap.set()

    async def _leave(self) -> None:
        with contextlib.suppress(ExperienceError):
            await self._pool.give_back(self._context.role, list(self._held))
        await self._replica.kill()
        await self._redis.aclose()
        self._left.set()

    async def _claim_groups(self) -> None:
        """Keep the engine busy.

        Consumes: granted claims. Produces: one task a group. Waits for: room in flight, an open engine, admission.
        Unblocked by: a group's end, a swap's end, a published step.
        """
        while True:
            room = self._rollout.max_in_flight_groups - len(self._groups)
            version = self._replica.version
            granted = 0
            if room > 0 and version is not None and not self._replica.is_closed:
                claim = await self._pool.claim(self._context.role, version, room, self._rollout.lease_seconds)
                granted = len(claim.groups)
                self._note_full_buffer(claim.refused == "bytes" and not granted)
                for group in claim.groups:
                    self._held.add(group.group_id)
                    self._groups[group.group_id] = self._group.create_task(self._play_group(group))
            if not granted:
                await asyncio.sleep(CLAIM_PAUSE_SECONDS)

    async def _play_group(self, group: ClaimedGroup) -> None:
        try:
            left = await self._recorder.adopt(group)
            async with asyncio.TaskGroup() as members:
                for member in group.members:
                    members.create_task(self._play_member(group, member, left.get(member)))
            self._held.discard(group.group_id)
        except* LaminarError as failures:
            raise first_error(failures) from None
        finally:
            self._groups.pop(group.group_id, None)

    async def _play_member(self, group: ClaimedGroup, member: int, left: Partial | None) -> None:
        """Play one member and submit the outcome; a failed one is played again as long as the data module says so."""
        try:
            for replay in itertools.count():
                trajectory = await self._try_member(group, member, replay, left if not replay else None)
                self._count(trajectory)
                outcome = await self._buffer.submit(trajectory, self._context.role)
                if outcome is not SubmitOutcome.REPLAY:
                    break
        except asyncio.CancelledError:
            self._num_aborted += 1
            raise
        if outcome.startswith("refused"):
            logger.info("submit %s: %s", trajectory.trajectory_id, outcome)

    async def _try_member(self, group: ClaimedGroup, member: int, replay: int, left: Partial | None) -> Trajectory:
        """Play one member until it has a reward, or its attempts are used up.

        What an earlier owner has left of it is gone on with under its own attempt, on which the noise hangs.
        """
        first = first_attempt(self._rollout, group.attempt, replay)
        attempts = list(range(first, first + self._rollout.max_attempts))
        for attempt in [left.attempt, *attempts[1:]] if left else attempts:
            journal = self._recorder.open(group, member, attempt, left)
            async with self._replica.bind():
                trajectory = await self._player.play(self._replica, group, member, attempt, Purpose.TRAIN, journal)
            self._end_record(journal)
            left = None
            if trajectory.failure is None:
                break
            self._failures[trajectory.failure.kind] += 1
            logger.warning("%s: %s: %s", trajectory.trajectory_id, trajectory.failure.kind, trajectory.failure.text)
            if trajectory.failure.kind is FailureKind.USER_BUG:
                break
        return trajectory

    def _note_full_buffer(self, is_full: bool) -> None:
        """Count the time in which nothing could be claimed because the buffer's bytes were all reserved."""
        now = time.monotonic()
        if self._full_since is not None:
            self._producer_wait_seconds += now - self._full_since
        self._full_since = now if is_full else None

    def _end_record(self, journal: Journal | None) -> None:
        """Count what needed not be sampled again; nothing more is put by."""
        if journal is not None:
            journal.close()
            self._resumed_tokens += journal.resumed_tokens

    def _count(self, trajectory: Trajectory) -> None:
        """Count an outcome; stop when nearly all of the last ones failed for good."""
        self._num_ended += 1
        self._last_outcomes.note(trajectory.failure)
        if excess := self._last_outcomes.excess():
            raise RunFailedError(excess)

    async def _follow_weights(self) -> None:
        """Keep the engine on the newest complete version.

        Consumes: versions on this machine. Produces: swaps. Waits for: a newer version; the end of an evaluation; then, in
        mode `trajectory`, an engine with no open trajectory. Unblocked by: the last open trajectory, or `max_hold_seconds`.
        """
        while True:
            await self._replica.wait_ready(self._rollout.engine.start_seconds)
            try:
                newer = await self._puller.wait_newer(self._replica.version, VERSION_WAIT_SECONDS)
            except DeadlineError:
                continue
            await self._may_swap.wait()
            try:
                if self._rollout.effective_weight_update == "trajectory":
                    async with self._replica.close_for_swap(self._rollout.max_hold_seconds) as drained:
                        if not drained:
                            logger.warning("held for %s s: swapping in flight", self._rollout.max_hold_seconds)
                        await self._replica.swap(self._puller.latest() or newer)
                else:
                    await self._replica.swap(newer)
            except RelayError as error:
                logger.info("swap to %s: %s", newer, error)

    async def _keep_engine(self) -> None:
        """Restart an engine that died, hangs, or was condemned."""
        probed = time.monotonic()
        while True:
            if reason := self._replica.problem():
                await self._restart_engine(reason)
            if time.monotonic() - probed > PROBE_SECONDS:
                await self._replica.probe()
                probed = time.monotonic()
            await asyncio.sleep(ENGINE_CHECK_SECONDS)

    async def _restart_engine(self, reason: str) -> None:
        logger.warning("engine: %s; restarting it", reason)
        await self._telemetry.emit("notice", fields={"text": f"engine restarted: {reason}"})
        if self._replica.restarts >= self._config.run.max_restarts:
            raise RunFailedError(
                f"the engine of {self._context.role} was restarted {self._replica.restarts} times: {reason}"
            )
        self._tokens_of_dead_engines, self._engine_tokens = self._tokens_of_dead_engines + self._engine_tokens, 0
        await self._replica.restart()

    async def _renew_leases(self) -> None:
        """Renew what is being played; give up what was lost to another worker, or let go while its event was missed."""
        while True:
            await asyncio.sleep(self._rollout.lease_seconds / 4)
            lost = await self._pool.renew(self._context.role, list(self._groups), self._rollout.lease_seconds)
            for group_id in lost:
                self._abort(group_id, "lost or evicted")

    async def _follow_events(self) -> None:
        """Abort at once, in the engine too, what the data module lets go.

        Consumes: the data module's events. Produces: cancelled groups. Waits for: the next event.
        """
        last = "0-0"
        while True:
            for event in await self._store.wait_events(last, EVENT_WAIT_SECONDS):
                last = event.event_id
                if event.kind in ("evicted", "failed"):
                    self._abort(event.group_id, f"{event.kind}: {event.detail}")

    def _abort(self, group_id: str, reason: str) -> None:
        self._held.discard(group_id)
        if task := self._groups.get(group_id):
            logger.info("aborting group %s: %s", group_id, reason)
            task.cancel()

    async def _report(self) -> None:
        """Say how the replica is doing."""
        while True:
            await self._telemetry.emit("worker", await self._measure())
            if alarm := self._last_outcomes.alarm():
                await self._telemetry.emit("notice", fields={"text": alarm})
            await asyncio.sleep(REPORT_SECONDS)

    async def _measure(self) -> dict[str, float]:
        metrics: dict[str, Any] = {
            "worker/open_trajectories": self._replica.num_open,
            "worker/finished_trajectories": self._num_ended,
            "worker/aborted_trajectories": self._num_aborted,
            "worker/version_number": -1 if self._replica.version is None else self._replica.version.number,
            "experience/producer_wait_seconds": self._producer_wait_seconds,
            "worker/resumed_tokens": self._resumed_tokens,
            "worker/engine_restarts": self._replica.restarts,
            "weights/swap_seconds": self._replica.last_swap_seconds,
            **{f"rollout/failures_{kind}": count for kind, count in self._failures.items()},
        }
        try:
            load = await self._replica.client.loads()
        except (EngineError, DeadlineError):
            load = None
        if load is not None:
            self._engine_tokens = load.generated_tokens
            metrics["engine/running"] = load.running
            metrics["engine/waiting"] = load.waiting
            metrics["engine/kv_use_ratio"] = load.used_tokens / max(load.capacity_tokens, 1)
        metrics["engine/generated_tokens"] = self._tokens_of_dead_engines + self._engine_tokens
        return metrics


def first_attempt(rollout: RolloutConfig, lease: int, replay: int) -> int:
    """Number of the first of `max_attempts` attempts; no two series share one, since noise hangs on the attempt.

    Args:
        rollout: sizes.
        lease: which worker in a row plays the group, from 1.
        replay: how often this one plays the member again, from 0; at most once for each member of the group.
    """
    return ((lease - 1) * (rollout.group_size + 1) + replay) * rollout.max_attempts
