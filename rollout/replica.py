"""One engine replica: its process, the weights it holds, and the trajectories that are open on it.

Invariants:
- `version` is what the engine was last seen to hold, or None: *unknown weights* (dead, or a swap that failed or was not
  answered). With unknown weights nothing is generated; the engine is *condemned*, and its one keeper restarts it.
- Open trajectories belong to the engine, guests included: `berths`.

It does not know groups, prompts or rewards.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from laminar.config.rollout import EngineConfig
from laminar.errors import DeadlineError, EngineError, RelayError
from laminar.telemetry.clock import StateClock
from laminar.types import FinishReason, Int32Array, SamplingParameters, WeightVersion
from relay.store import WEIGHTS_NAME
from rollout.berths import Berths
from rollout.engine_handle import EngineHandle, StartEngine, WeightSource
from rollout.engines.client import BrokenAnswerError, EngineClient
from rollout.generation import Generation, OnSegment
from rollout.quarantine import Quarantine, RejectedWeightsError
from rollout.trial import Trial
from rollout.verification import Check, Verdict, check_held, check_probe
from rollout.waiting import wait_until

logger = logging.getLogger("laminar.rollout.replica")

ABORT_SECONDS = 5.0
HEALTH_SECONDS = 10.0
MAX_PULLS = 8
"""Updates between two reports that are drawn."""


@dataclass(slots=True)
class _Request:
    """A request on its way: the engine's name for it, and who answers it once it was sent."""

    engine_id: str
    client: EngineClient | None = None
    is_aborted: bool = False


class Replica:
    """An engine that is kept alive and on known weights."""

    def __init__(self, config: EngineConfig, puller: WeightSource, start_engine: StartEngine) -> None:
        self._config, self._puller, self._start_engine = config, puller, start_engine
        self._process: EngineHandle | None = None
        self._client: EngineClient | None = None
        self._changed = asyncio.Condition()
        self.berths = Berths(self._changed, lambda: self.version, config, self._note_activity)
        self._requests: dict[str, _Request] = {}
        self._holds_turns = False
        self._hold_seconds = 0.0
        self._idle = "idle"
        self._swapping = False
        self.clock = StateClock("start")
        self._condemned = ""
        self.version: WeightVersion | None = None
        self.restarts = 0
        self.last_swap_seconds = 0.0
        self.last_pull: tuple[float, int] | None = None
        """Seconds and bytes of the last update; None before the first."""
        self.asked_tokens = self.cached_tokens = 0
        """Of all contexts that engines were asked to continue; of these, those whose keys and values they had already."""
        self._pulls: deque[tuple[float, float]] = deque(maxlen=MAX_PULLS)
        self.last_verdict: Verdict | None = None
        """On the weights that came with the last swap."""
        self.quarantine = Quarantine()
        self._trial = Trial()

    @property
    def client(self) -> EngineClient:
        """The engine's client.

        Raises:
            EngineError: while the engine is being restarted.
        """
        if self._client is None:
            raise EngineError("the engine is being restarted")
        return self._client

    @property
    def is_down(self) -> bool:
        """Whether the engine is dead, condemned or being restarted; one that exchanges its weights is not."""
        return self._client is None or bool(self.problem())

    def problem(self) -> str:
        """Why the engine must be restarted; empty if it need not."""
        if self._process is not None and self._process.returncode is not None:
            return f"its process ended with status {self._process.returncode}"
        return self._condemned

    async def condemn(self, reason: str) -> None:
        """Declare the engine's weights unknown: nothing is generated until it has been restarted."""
        self._condemned = self._condemned or reason
        await self._set_version(None)

    async def start(self) -> None:
        """Start the engine on the newest complete version. One that does not hold what it should is condemned at once.

        Raises:
            RelayError: there is none.
            EngineError, DeadlineError: it does not come up.
        """
        with self._lease_newest() as (version, path):
            try:
                self._process, self._client = await self._start_engine(path, version)
            except RejectedWeightsError as error:
                self.quarantine.note_rejection(error.verdict)
                await self.condemn(str(error))
                return
        self._trial = Trial()
        await self._set_version(version)

    @contextlib.contextmanager
    def _lease_newest(self) -> Iterator[tuple[WeightVersion, Path]]:
        """Hold the newest version; one that is superseded between the look and the lease is looked up anew."""
        with contextlib.ExitStack() as stack:
            while True:
                version = self._puller.latest()
                if version is None:
                    raise RelayError("no weight version is there; the trainer publishes its first before workers start")
                try:
                    path = stack.enter_context(self._puller.lease(version))
                    break
                except RelayError:
                    if self._puller.latest() == version:
                        raise
            yield version, path

    async def restart(self) -> None:
        """Kill the engine, whatever state it is in, and start it anew."""
        await self._set_version(None)
        self.restarts += 1
        await self.kill()
        self._condemned = ""
        await self.start()

    async def kill(self) -> None:
        """End the engine process."""
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            await self._process.kill()
        self._process = self._client = None

    async def generate(
        self, input_ids: Int32Array, sampling: SamplingParameters, request_id: str, on_segment: OnSegment | None = None, /
    ) -> Generation:
        """Continue `input_ids` (T,) int32 once the weights are known; a cancelled caller's request is aborted.

        Args:
            input_ids: prompt and whatever was sampled or given after it.
            sampling: how tokens are drawn.
            request_id: the caller's name for it, for the log; the engine gets one of its own.
            on_segment: if given, hears of every new part. If the engine then dies, the answer is what had come, as aborted:
                the caller asks again for the rest.

        Raises:
            EngineError: the engine answered wrongly, or not at all.
            DeadlineError: it did not answer in time.
        """
        request = self._requests[request_id] = _Request(uuid.uuid4().hex)
        self._note_activity()
        try:
            ready = lambda: self._takes_requests or request.is_aborted  # noqa: E731
            await wait_until(self._changed, ready, "the engine to be ready", self._config.start_seconds + self._hold_seconds)
            if request.is_aborted:
                return Generation((), FinishReason.ABORT)
            request.client = self.client
            return await self._send(request.client, input_ids, sampling, request_id, on_segment)
        finally:
            del self._requests[request_id]
            self._note_activity()
            if self._holds_turns:
                async with self._changed:
                    self._changed.notify_all()

    @property
    def _takes_requests(self) -> bool:
        return self.version is not None and not self._holds_turns

    @property
    def _num_sent(self) -> int:
        """Requests that the engine has."""
        return sum(request.client is not None for request in self._requests.values())

    async def _send(
        self,
        client: EngineClient,
        input_ids: Int32Array,
        sampling: SamplingParameters,
        request_id: str,
        on_segment: OnSegment | None,
    ) -> Generation:
        trial = self._trial
        hear = None if on_segment is None else trial.guard(on_segment)
        engine_id = self._requests[request_id].engine_id
        try:
            generation = await client.generate(input_ids, sampling, engine_id, hear)
            self.asked_tokens += len(input_ids)
            self.cached_tokens += generation.cached_tokens
            return await trial.settle(generation)
        except BrokenAnswerError as error:
            received = await trial.settle(error.received)
            logger.info("request %s: %s; %d tokens are kept", request_id, error, received.num_tokens)
            await self.probe(client)
            return received
        except (EngineError, DeadlineError):
            await self.probe(client)
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError, DeadlineError, TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await client.abort(engine_id)
            logger.debug("request %s was cancelled", request_id)
            raise

    async def abort(self, request_id: str) -> None:
        """End a request: its `generate` returns what was sampled. Nothing happens if there is none of that name.

        Raises:
            EngineError, DeadlineError: the engine does not take it.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        async with self._changed:
            request.is_aborted = True
            self._changed.notify_all()
        if request.client is not None:
            await request.client.abort(request.engine_id)

    async def probe(self, client: EngineClient | None = None) -> None:
        """Ask the engine whether it is well; one that is not gets no further requests, which would fail as well."""
        client = client or self._client
        if client is None or client is not self._client or self._condemned:
            return
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await client.health()
        except (EngineError, DeadlineError, TimeoutError) as error:
            if self._client is client:
                await self.condemn(str(error) or f"it did not answer /health within {HEALTH_SECONDS:g} s")

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the engine holds known weights."""
        await wait_until(self._changed, lambda: self.version is not None, "the engine to be restarted", seconds)

    async def wait_number(self, number: int, seconds: float) -> None:
        """Wait until the engine holds a version of at least this number."""
        held = lambda: self.version is not None and self.version.number >= number  # noqa: E731
        if not held():
            await wait_until(self._changed, held, f"the engine to hold version number {number}", seconds)

    @contextlib.asynccontextmanager
    async def hold_turns(self, max_hold_seconds: float) -> AsyncIterator[bool]:
        """Let no new turn begin and wait until none is being sampled; yields whether that happened in time."""
        self._holds_turns, self._hold_seconds = True, max_hold_seconds
        try:
            await wait_until(self._changed, lambda: not self._num_sent, "turns to end before a swap", max_hold_seconds)
            ended = True
        except DeadlineError:
            ended = False
        try:
            yield ended
        finally:
            async with self._changed:
                self._holds_turns = False
                self._changed.notify_all()

    async def swap(self, version: WeightVersion) -> None:
        """Give the engine a newer version: pause, update, verify, continue; the probe comes after that (`rollout.trial`).

        An engine that refuses, does not answer, or does not hold what it should is condemned. One that is being restarted is
        left alone: it starts on the newest version.

        Raises:
            RelayError: the version is gone (a newer one is there); the engine is untouched.
        """
        client, started = self._client, time.monotonic()
        if client is None or self.version is None:
            return
        with self._puller.lease(version) as path:
            self._swapping = True
            await self._set_version(None)
            trial = self._trial
            try:
                verdict = await self._exchange_weights(client, path, version)
                self._swapping = False
                if verdict.is_accepted and self._client is client:
                    await self._set_version(version)
                    self.last_swap_seconds = time.monotonic() - started
                    verdict = await check_probe(client, path, version, self._config.probe_tolerance)
                trial.end(accepted=verdict.is_accepted and verdict.check is Check.ALL)
            except (EngineError, DeadlineError) as error:
                verdict = Verdict(version, Check.ANSWER, str(error))
            finally:
                self._swapping = False
                trial.end(accepted=False)
            self.last_verdict = verdict
            if verdict.check is not Check.ANSWER:  # one that did not answer holds unknown weights, not wrong ones
                self.quarantine.note_swap(verdict)
            if not verdict.is_accepted and self._client is client:
                await self.condemn(verdict.reason)

    async def _exchange_weights(self, client: EngineClient, path: Path, version: WeightVersion) -> Verdict:
        """Pause, update, look at what is held, and go on unless that is wrong."""
        mode = self._config.swap if self._num_sent else "retract"
        await client.pause(mode)
        started = time.monotonic()
        await client.update_weights(path, version, flush_cache=mode == "retract")
        seconds, ended = time.monotonic() - started, time.time()
        self.last_pull = (seconds, (path / WEIGHTS_NAME).stat().st_size)
        self._pulls.append((ended - seconds, ended))
        verdict = await check_held(client, version)
        if verdict.is_accepted:
            self._trial.begin(version)
            await client.resume()
        return verdict

    async def _set_version(self, version: WeightVersion | None) -> None:
        async with self._changed:
            self.version = version
            self._note_activity()
            self._changed.notify_all()

    def take_pulls(self) -> list[tuple[float, float]]:
        """Start and end, in Unix seconds, of the updates since the last call; the newest ones."""
        pulls = list(self._pulls)
        self._pulls.clear()
        return pulls

    def say_idle(self, reason: str) -> None:
        """Why nothing is to be done when nothing is done: the name of that state."""
        self._idle = reason
        self._note_activity()

    def _note_activity(self) -> None:
        """Tell the clock what is going on."""
        if self._swapping:
            state = "swap"
        elif self.version is None:
            state = "restart" if self.restarts else "start"
        elif self.berths.is_closed and self.berths.occupants:
            state = "drain"
        elif self._requests:
            state = "decode"
        else:
            state = "environment" if self.berths.occupants else self._idle
        self.clock.enter(state)
