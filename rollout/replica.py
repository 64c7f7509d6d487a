"""One engine replica: its process, the weights it holds, and the trajectories that are open on it.

Invariants:
- `version` is what the engine was last seen to hold, or None: *unknown weights* (dead, or a swap that failed or was not
  answered). With unknown weights nothing is generated; the engine is *condemned*, and its one keeper restarts it.
- Open trajectories belong to the engine. `bind` and `close_for_swap` exclude each other through one condition.

It does not know groups, prompts or rewards.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from laminar.config.rollout import EngineConfig
from laminar.errors import DeadlineError, EngineError, RelayError
from laminar.telemetry.clock import StateClock
from laminar.types import Int32Array, SamplingParameters, WeightVersion, sampled
from relay.puller import Puller
from relay.store import WEIGHTS_NAME
from rollout.engines.client import BrokenAnswerError, EngineClient, OnTokens
from rollout.engines.process import EngineProcess
from rollout.generation import Generation, OnSegment

logger = logging.getLogger("laminar.rollout.replica")

ABORT_SECONDS = 5.0
HEALTH_SECONDS = 10.0

StartEngine = Callable[[Path, WeightVersion], Awaitable[tuple[EngineProcess, EngineClient]]]
"""Starts an engine on a folder of weights; ready when it returns."""


class Replica:
    """An engine that is kept alive and on known weights."""

    def __init__(self, config: EngineConfig, puller: Puller, start_engine: StartEngine) -> None:
        self._config, self._puller, self._start_engine = config, puller, start_engine
        self._process: EngineProcess | None = None
        self._client: EngineClient | None = None
        self._changed = asyncio.Condition()
        self._open = self._requests = 0
        self._closed = self._swapping = False
        self._idle = "idle"
        self.clock = StateClock("start")
        self._condemned = ""
        self.version: WeightVersion | None = None
        self.restarts = 0
        self.last_swap_seconds = 0.0
        self.last_pull: tuple[float, int] | None = None
        """Seconds and bytes of the last update; None before the first."""

    @property
    def client(self) -> EngineClient:
        """The engine's client.

        Raises:
            EngineError: while the engine is being restarted.
        """
        if self._client is None:
            raise EngineError("the engine is being restarted")
        return self._client

    def say_idle(self, reason: str) -> None:
        """Why nothing is to be done when nothing is done: the name of that state."""
        self._idle = reason
        self._note_state()

    def _note_state(self) -> None:
        """What the replica does now, for the clock."""
        if self._swapping:
            state = "swap"
        elif self.version is None:
            state = "restart" if self.restarts else "start"
        elif self._closed:
            state = "drain"
        elif self._requests:
            state = "decode"
        else:
            state = "environment" if self._open else self._idle
        self.clock.enter(state)

    @property
    def num_open(self) -> int:
        """Trajectories that are open on this engine."""
        return self._open

    @property
    def is_closed(self) -> bool:
        """Whether it admits nothing, because it drains for a swap."""
        return self._closed

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
        """Start the engine on the newest complete version.

        Raises:
            RelayError: there is none.
            EngineError, DeadlineError: it does not come up.
        """
        with self._lease_newest() as (version, path):
            self._process, self._client = await self._start_engine(path, version)
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
        await self.wait_ready(self._config.start_seconds)
        client, engine_id = self.client, uuid.uuid4().hex
        on_tokens = None if on_segment is None else as_segments(on_segment, masked_heads=self._config.swap == "in_place")
        try:
            with self._at_engine():
                return await client.generate(input_ids, sampling, engine_id, on_tokens)
        except BrokenAnswerError as error:
            logger.info("request %s: %s; %d tokens are kept", request_id, error, error.received.num_tokens)
            await self.probe(client)
            return error.received
        except (EngineError, DeadlineError):
            await self.probe(client)
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError, DeadlineError, TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await client.abort(engine_id)
            logger.info("request %s was cancelled", request_id)
            raise

    @contextlib.contextmanager
    def _at_engine(self) -> Iterator[None]:
        self._requests += 1
        self._note_state()
        try:
            yield
        finally:
            self._requests -= 1
            self._note_state()

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
        await self._wait_for(lambda: self.version is not None, "the engine to be restarted", seconds)

    async def wait_number(self, number: int, seconds: float) -> None:
        """Wait until the engine holds a version of at least this number."""
        held = lambda: self.version is not None and self.version.number >= number  # noqa: E731
        if not held():
            await self._wait_for(held, f"the engine to hold version number {number}", seconds)

    @contextlib.asynccontextmanager
    async def bind(self) -> AsyncIterator[None]:
        """Hold one open trajectory; a replica that is closed for a swap lets new ones wait."""
        async with self._changed:
            self._open += 1
            self._note_state()
        try:
            yield
        finally:
            async with self._changed:
                self._open -= 1
                self._note_state()
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def close_for_swap(self, max_hold_seconds: float) -> AsyncIterator[bool]:
        """Admit nothing and wait until no trajectory is open; yields whether that happened in time."""
        self._closed = True
        self._note_state()
        try:
            await self._wait_for(lambda: self._open == 0, "open trajectories to end before a swap", max_hold_seconds)
            drained = True
        except DeadlineError:
            drained = False
        try:
            yield drained
        finally:
            self._closed = False
            self._note_state()

    async def swap(self, version: WeightVersion) -> None:
        """Give the engine a newer version: pause, update, verify, continue.

        An engine that refuses or does not answer is condemned. One that is being restarted is left alone: it starts on the
        newest version.

        Raises:
            RelayError: the version is gone (a newer one is there); the engine is untouched.
        """
        client, started = self._client, time.monotonic()
        if client is None or self.version is None:
            return
        with self._puller.lease(version) as path:
            self._swapping = True
            await self._set_version(None)
            try:
                await self._exchange_weights(client, path, version)
            except (EngineError, DeadlineError) as error:
                if self._client is client:
                    await self.condemn(str(error))
                return
            finally:
                self._swapping = False
        if self._client is client:
            await self._set_version(version)
            self.last_swap_seconds = time.monotonic() - started

    async def _exchange_weights(self, client: EngineClient, path: Path, version: WeightVersion) -> None:
        mode = self._config.swap if self._open else "retract"
        await client.pause(mode)
        started = time.monotonic()
        await client.update_weights(path, version, flush_cache=mode == "retract")
        self.last_pull = (time.monotonic() - started, (path / WEIGHTS_NAME).stat().st_size)
        held = await client.weight_version()
        if held != version:
            raise EngineError(f"after the swap to {version} the engine says it holds {held}")
        await client.resume()

    async def _set_version(self, version: WeightVersion | None) -> None:
        async with self._changed:
            self.version = version
            self._note_state()
            self._changed.notify_all()

    async def _wait_for(self, condition: Callable[[], bool], name: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise DeadlineError(name, seconds) from None


def as_segments(on_segment: OnSegment, *, masked_heads: bool) -> OnTokens:
    """Turn an engine's parts into segments; with `masked_heads` a later version's first token is masked (in-place swaps)."""
    last: WeightVersion | None = None

    def on_tokens(ids: list[int], logprobs: list[float], version: WeightVersion) -> None:
        nonlocal last
        masked = int(masked_heads and last is not None and version != last)
        last = version
        on_segment(sampled(ids, logprobs, version, masked))

    return on_tokens
