"""The rollout worker: claims groups, plays their episodes on one engine, submits, follows weights.

Its loops are independent: none waits for training, none waits for a broadcast. A rollout reads the last complete version on
its own machine. What limits it is admission (the staleness bound, the buffer's bytes) and its own in-flight limit.

It does not know how batches are made or weights are written.
"""

import asyncio
import contextlib
import itertools
import logging
from functools import partial

from redis.asyncio import Redis

from laminar.cluster.roles import RoleContext
from laminar.codec import decode_prompt
from laminar.config.rollout import RolloutConfig
from laminar.config.root import LaminarConfig
from laminar.config.sizes import members_per_group
from laminar.directory import ReplicaDirectory, ReplicaEntry
from laminar.errors import (
    DeadlineError,
    EngineError,
    ExperienceError,
    LaminarError,
    RelayError,
    first_error,
)
from laminar.experience.answers import SubmitOutcome
from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.partial import Partial, PartialPool
from laminar.experience.prompts import PromptPool
from laminar.experience.store import ExperienceStore
from laminar.telemetry.clock import REPORT_SECONDS
from laminar.telemetry.stream import TelemetryWriter
from laminar.types import ClaimedGroup, FailureKind, Purpose, Trajectory
from relay.puller import Puller, open_puller
from rollout.engines.wire import EngineLoad
from rollout.environments.factory import is_resumable
from rollout.episode_trace import EpisodeTrace
from rollout.evaluation import EvaluationResult, evaluate
from rollout.guest_door import GuestDoor
from rollout.harbour import Harbour
from rollout.in_flight import InFlightLimit
from rollout.keeper import EngineKeeper
from rollout.occupants import guest_limits
from rollout.player import Player
from rollout.recorder import PartialRecorder
from rollout.replica import Replica
from rollout.seat import Seats
from rollout.siblings import Siblings
from rollout.start_engine import engine_starter
from rollout.swap_gate import SwapGate
from rollout.trajectory_log import TrajectoryLog
from rollout.worker_counts import WorkerCounts

logger = logging.getLogger("laminar.rollout.worker")

CONNECT_SECONDS = 60.0
CLAIM_PAUSE_SECONDS = 0.03
"""Pause after a claim that was refused."""
EVENT_WAIT_SECONDS = 5.0
"""One wait for news from the data module; shorter than its connections' deadline."""
VERSION_WAIT_SECONDS = 5.0


class RolloutWorker:
    """One replica's worker."""

    def __init__(self, context: RoleContext, config: LaminarConfig) -> None:
        self._context, self._config = context, config
        self._rollout, self._num_members = config.rollout, members_per_group(config)
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._held: set[str] = set()
        self._stopping = asyncio.Event()
        self._left = asyncio.Event()
        self._counts = WorkerCounts(self._rollout)
        self._trace = EpisodeTrace(config.metrics.trajectory_rate if config.metrics.trace else 0.0)
        self._limit = InFlightLimit(self._rollout.max_in_flight_groups, adapts=self._rollout.adapt_in_flight)

    async def start(self) -> None:
        """Connect, wait for weights, start the engine."""
        client = await connect(self._context.redis_url, patience_seconds=CONNECT_SECONDS)
        player = Player(self._config, worker=self._context.role)
        puller = open_puller(self._config.relay, self._context.run_id, self._context.node_id)
        await puller.wait_newer(None, self._config.run.no_progress_seconds)  # the trainer may replay before it publishes
        replica = Replica(self._rollout.engine, puller, engine_starter(self._context, self._config))
        await self.equip(client, player, puller, replica, self._open_log(player))

    def _open_log(self, player: Player) -> TrajectoryLog:
        metrics, folder = self._config.metrics, self._context.run_folder / "trajectories"
        max_bytes = metrics.max_trajectory_bytes // self._rollout.num_workers
        return TrajectoryLog(folder, self._context.role, player.tokenizer, rate=metrics.trajectory_rate, max_bytes=max_bytes)

    async def equip(
        self, client: Redis, player: Player, puller: Puller, replica: Replica, log: TrajectoryLog | None = None
    ) -> None:
        """Take its parts and start the engine; `start` makes the real ones."""
        self._log, self._gate = log, SwapGate(replica)
        self._redis, self._player, self._puller, self._replica = client, player, puller, replica
        self._store = ExperienceStore(client, self._context.run_id)
        self._pool, self._buffer = PromptPool(self._store), ExperienceBuffer(self._store)
        self._recorder = PartialRecorder(
            PartialPool(self._store),
            batch_tokens=self._config.experience.partial_tokens,
            is_resumable=is_resumable(self._config.environment),
        )
        self._telemetry = TelemetryWriter(client, self._context.run_id, self._context.role)
        self._directory = ReplicaDirectory(client, self._context.run_id)
        self._harbour = Harbour(
            self._directory,
            token=self._context.token,
            request_seconds=self._rollout.engine.request_seconds,
            move_seconds=self._rollout.repack.deadline_seconds,
        )
        self._seats = Seats(replica, self._harbour)
        limits = guest_limits(self._config)
        self._door = GuestDoor(replica, limits, token=self._context.token, release=self._release)
        self._keeper = EngineKeeper(
            replica,
            self._context.role,
            self._config.run.max_restarts,
            tell=self._tell,
            has_others=self._has_others,
            on_death=self._counts.engine_died,
            leave=self._stopping.set,
        )
        await replica.start()

    async def run(self) -> None:
        """Work until stopped.

        Raises:
            RunFailedError: nearly every trajectory fails; carries the first error's text.
        """
        loops = [
            self._claim_groups(), self._follow_weights(), self._renew_leases(), self._follow_events(), self._keeper.run(),
            self._report(), self._recorder.run(),
            *([self._log.run()] if self._log else []),
        ]  # fmt: skip
        try:
            async with self._door.open(self._context.node_address) as self._harbour.url, asyncio.TaskGroup() as group:
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

    async def limit_in_flight(self, num_groups: int) -> None:
        """Play at most so many groups at once from now on; those that are being played go on."""
        self._limit.set_ceiling(num_groups)

    async def evaluate(self, prompts: list[bytes], min_number: int, wait_seconds: float) -> EvaluationResult:
        """Answer held-out prompts with one version of at least this number, awaited so long; see `SwapGate`.

        Takes no slot of the staleness bound and writes nothing into the buffer.
        """
        seconds = self._config.eval.timeout_seconds
        async with self._gate.evaluation(min_number, wait_seconds=wait_seconds, seconds=seconds):
            return await evaluate(self._player, self._replica, [decode_prompt(p) for p in prompts], self._config)

    async def _leave(self) -> None:
        """Give back groups, then close every part, also if one of them fails; then say that all is done."""
        async with contextlib.AsyncExitStack() as steps:  # the last one first
            steps.callback(self._left.set)
            steps.push_async_callback(self._redis.aclose)
            steps.push_async_callback(self._directory.forget, self._context.role)
            if self._log:
                steps.callback(self._log.write)
            steps.push_async_callback(self._replica.kill)
            steps.push_async_callback(self._player.close)
            steps.push_async_callback(self._harbour.close)
            with contextlib.suppress(ExperienceError):
                await self._pool.give_back(self._context.role, list(self._held))

    async def _claim_groups(self) -> None:
        """Keep the engine busy.

        Consumes: granted claims. Produces: one task a group. Waits for: room in flight, an open engine, admission.
        Unblocked by: a group's end, a swap's end, a published step.
        """
        while True:
            room = self._limit.groups - self._num_here
            version = self._replica.version
            granted = 0
            if room > 0 and version is not None and not self._replica.berths.is_closed:
                claim = await self._pool.claim(self._context.role, version, room, self._rollout.lease_seconds)
                granted = len(claim.groups)
                self._counts.note_full_buffer(claim.refused == "bytes" and not granted)
                self._replica.say_idle(f"idle_{claim.refused}" if claim.refused else "idle")
                for group in claim.groups:
                    if group.group_id not in self._groups:  # else its lease ran out, and it is played on (not put by)
                        self._start_group(group)
            if not granted:
                await asyncio.sleep(CLAIM_PAUSE_SECONDS)

    def _start_group(self, group: ClaimedGroup) -> None:
        self._held.add(group.group_id)
        self._groups[group.group_id] = self._group.create_task(self._play_group(group))
        self._groups[group.group_id].add_done_callback(lambda _: self._groups.pop(group.group_id, None))

    async def _play_group(self, group: ClaimedGroup) -> None:
        try:
            left = await self._recorder.adopt(group)
            submit = partial(self._buffer.submit_many, worker=self._context.role, together=True)
            siblings = Siblings(len(group.members), submit, self._player.judge_of(group))
            async with asyncio.TaskGroup() as members:
                for member in group.members:
                    members.create_task(self._play_member(group, member, left.get(member), siblings))
            self._held.discard(group.group_id)
        except* LaminarError as failures:
            raise first_error(failures) from None

    async def _play_member(self, group: ClaimedGroup, member: int, left: Partial | None, siblings: Siblings) -> None:
        """Play one member and submit the outcome; a failed one is played again as long as the data module says so."""
        try:
            for replay in itertools.count():
                played = self._trace.add(await self._try_member(group, member, replay, left if not replay else None))
                if played.failure is not None:
                    self._counts.end(played)
                trajectory, outcome = await siblings.hand_in(played)
                if played.failure is None:
                    self._counts.note_failure(trajectory)
                    self._counts.end(trajectory)
                if self._log and (trajectory.failure is not None or outcome is SubmitOutcome.ACCEPTED):
                    self._log.add(trajectory)  # what was refused, or is a duplicate, would be taken for what was trained
                if outcome is not SubmitOutcome.REPLAY:
                    break
        except asyncio.CancelledError:
            self._counts.num_aborted += 1
            raise
        if outcome.startswith("refused"):
            logger.info("submit %s: %s", trajectory.trajectory_id, outcome)

    async def _try_member(self, group: ClaimedGroup, member: int, replay: int, left: Partial | None) -> Trajectory:
        """Play one member until it has a reward, or its attempts are used up.

        What an earlier owner has left of it is gone on with under its own attempt, on which the noise hangs.
        """
        first = first_attempt(self._rollout, group.attempt, replay, self._num_members)
        attempts = list(range(first, first + self._rollout.max_attempts))
        purpose = Purpose.TRAIN if member < self._rollout.group_size else Purpose.GREEDY_BASELINE
        for attempt in [left.attempt, *attempts[1:]] if left else attempts:
            journal = self._recorder.open(group, member, attempt, left)
            async with self._seats.open(group.group_id) as seat:
                trajectory = await self._player.play(seat, group, member, attempt, purpose, journal)
            self._counts.end_record(journal)
            left = None
            if self._counts.note_failure(trajectory) in (None, FailureKind.USER_BUG):
                break
        return trajectory

    async def _follow_weights(self) -> None:
        """Keep the engine on the newest complete version.

        Consumes: versions on this machine. Produces: swaps. Waits for: a newer version; the end of an evaluation; then, in
        mode `trajectory`, an engine with no open trajectory; in mode `turn`, one that samples no turn. Unblocked by: the
        last of them, a release, or `max_hold_seconds`.
        """
        while True:
            await self._replica.wait_ready(self._rollout.engine.start_seconds)
            try:
                newer = await self._puller.wait_newer(self._replica.version, VERSION_WAIT_SECONDS)
            except DeadlineError:
                continue
            try:
                async with self._gate.swap(), self._pause_admission() as drained:
                    if not drained:
                        logger.warning("held for %s s: swapping in flight", self._rollout.max_hold_seconds)
                    await self._replica.swap(self._puller.latest() or newer)
            except RelayError as error:
                logger.info("swap to %s: %s", newer, error)

    def _pause_admission(self) -> contextlib.AbstractAsyncContextManager[bool]:
        """What has to come to its end before a swap, by update mode."""
        seconds = self._rollout.max_hold_seconds
        match self._rollout.effective_weight_update:
            case "trajectory":
                return self._replica.berths.close_for_swap(seconds)
            case "turn":
                return self._replica.hold_turns(seconds)
            case "in_flight":
                return contextlib.nullcontext(True)

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
        """Say how the replica is doing: to the directory, to the observer; and let its pressure set the in-flight limit."""
        while True:
            load = await self._load()
            await self._directory.beat(self._entry(load))
            self._limit.adapt(load, self._num_here)
            states, spans = self._replica.clock.take()
            metrics = self._measure(load) | self._counts.split_generating(states, load)
            drawn = {"spans": spans, "episodes": self._trace.take(), "pulls": self._replica.take_pulls()}
            await self._telemetry.emit("worker", metrics, fields={name: values for name, values in drawn.items() if values})
            if alarm := self._counts.alarm():
                await self._tell(alarm)
            await asyncio.sleep(REPORT_SECONDS)

    async def _tell(self, text: str) -> None:
        await self._telemetry.emit("notice", fields={"text": text})

    async def _has_others(self) -> bool:
        return any(entry.version and entry.replica != self._context.role for entry in await self._directory.entries())

    async def _load(self) -> EngineLoad | None:
        try:
            return await self._replica.client.loads()
        except (EngineError, DeadlineError):
            return None

    def _entry(self, load: EngineLoad | None) -> ReplicaEntry:
        berths, newest = self._replica.berths, self._puller.latest()
        return ReplicaEntry(
            replica=self._context.role,
            url=self._harbour.url,
            version="" if self._replica.version is None else str(self._replica.version),
            newest="" if newest is None else str(newest),
            is_draining=berths.is_closed,
            context_tokens=sum(occupant.context_tokens for occupant in berths.occupants),
            capacity_tokens=self._rollout.engine.max_cached_tokens,
            num_open=len(berths.occupants),
            num_waiting=load.waiting if load is not None else 0,
            num_admitted=berths.num_admitted,
            remaining_tokens=max((occupant.expected_tokens for occupant in berths.occupants), default=0),
        )

    @property
    def _num_here(self) -> int:
        """Groups that take room on this engine; those that are generated elsewhere do not."""
        return len(self._groups) - self._seats.num_away(self._groups)

    def _measure(self, load: EngineLoad | None) -> dict[str, float]:
        return self._counts.metrics(self._replica, load) | {
            "worker/away_groups": len(self._groups) - self._num_here,
            "worker/in_flight_limit": self._limit.groups,
            "worker/records_left_out": self._log.left_out if self._log else 0,
        }

    async def _release(self, url: str) -> dict[str, int]:
        """The manager's command: move everything that is open here, guests too, to the replica whose door is there."""
        outcome = await self._seats.release(url)
        self._counts.num_moved += outcome["moved"]
        return outcome | {"guests": self._door.send_on(url)}


def first_attempt(rollout: RolloutConfig, lease: int, replay: int, num_members: int) -> int:
    """Number of the first of `max_attempts` attempts; no two series share one, since noise hangs on the attempt.

    Args:
        rollout: sizes.
        lease: which worker in a row plays the group, from 1.
        replay: how often this one plays the member again, from 0; at most once for each member of the group.
        num_members: of the group.
    """
    return ((lease - 1) * (num_members + 1) + replay) * rollout.max_attempts
