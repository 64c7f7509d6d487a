"""The door to an engine, whichever kind it is: SGLang's HTTP protocol, checked at every answer.

Invariants: every call has a deadline; an answer whose ids and log-probs do not match in number is an error, never padded;
after an in-place swap the first token of the later version is marked as masked, because two versions computed its context;
while we pause the engine, new requests are held here (SGLang would lose their aborts, and they are to carry the key of the
weights that will answer them); weights change during a pause only (SGLang would wait for all running requests).
This module knows neither torch nor processes.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np

from laminar.errors import DeadlineError, EngineError
from laminar.types import FinishReason, Int32Array, SamplingParameters, WeightVersion
from rollout.engines.answers import AnswerStream, protocol_kept, read_answer, read_scores
from rollout.engines.pinned_load import PinnedLoad
from rollout.engines.weights_file import TensorForms, check_same_forms, read_forms
from rollout.engines.wire import RUN_HEADER, EngineLoad, PauseMode, RankReport
from rollout.generation import Generation, OnSegment

REQUEST_ID_LENGTH = 32
"""All ids have one length: SGLang aborts by prefix, so a shorter id would take longer ones with it."""


class BrokenAnswerError(EngineError):
    """A stream broke off; `received` is what had come, as an aborted answer: nobody has to sample it again."""

    def __init__(self, text: str, received: Generation) -> None:
        super().__init__(text)
        self.received = received


class EngineClient:
    """Calls one engine.

    Args:
        url: where it listens.
        token: its bearer token.
        run_id: the run we belong to.
        version: the weights it holds, sent as `extra_key` with each request, so that no prefix of other weights is reused.
        swap: what an update does to running requests; decides the mask at a version's first token.
        first_weights: the folder that the engine was started on, for an engine that does not check what it loads: it is
            shown no later file without the same tensors.
        reads_back: whether the engine tells what its ranks hold.
        pinned: its ranks load slots by themselves (`rollout.engine.weight_load`); None: it loads files.
        request_seconds: deadline of one answer.
        control_seconds: deadline of every other call.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        run_id: str = "",
        version: WeightVersion | None = None,
        swap: Literal["retract", "in_place"] = "retract",
        first_weights: Path | None = None,
        reads_back: bool = False,
        pinned: PinnedLoad | None = None,
        request_seconds: float = 600.0,
        control_seconds: float = 120.0,
    ) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}", RUN_HEADER: run_id}
        self._version = self._first_version = version
        self._swap = swap
        self._reads_back, self._pinned = reads_back, pinned
        self._request_seconds = request_seconds
        self._control_seconds = control_seconds
        self._session: aiohttp.ClientSession | None = None
        self._received_tokens = 0
        self._tensor_forms: TensorForms | None = None if first_weights is None else read_forms(first_weights)
        self._paused = self._is_closed = False
        self._scopes: set[asyncio.Timeout] = set()
        self._held: dict[str, asyncio.Future[bool]] = {}

    async def close(self) -> None:
        """Close the connections; calls that are on their way fail."""
        self._is_closed = True
        self._release(EngineError(f"{self.url}: the client was closed"))
        for scope in self._scopes:
            scope.reschedule(0)  # a reader of a closed aiohttp session would wait for ever
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: SamplingParameters,
        request_id: str,
        on_segment: OnSegment | None = None,
    ) -> Generation:
        """Continue `input_ids` (T,) int32.

        Args:
            input_ids: prompt and whatever was sampled or given after it.
            sampling: texts in `stop` are the caller's to match.
            request_id: 32 characters, for `abort`.
            on_segment: if given, the answer is streamed and this hears of every new part.

        Raises:
            BrokenAnswerError: the engine broke off after the first part of a stream.
            EngineError: the engine answered wrongly, or not at all.
            DeadlineError: it did not answer in time; the request is aborted.
        """
        if len(request_id) != REQUEST_ID_LENGTH:
            raise EngineError(f"request id {request_id!r} must have {REQUEST_ID_LENGTH} characters (uuid4().hex)")
        if not await self._pass_gate(request_id):
            return Generation((), FinishReason.ABORT)
        sent_under, masked_heads = self._version, self._swap == "in_place"
        content = self._request(input_ids, sampling, request_id, stream=on_segment is not None)
        stream = None
        if on_segment is not None:
            stream = AnswerStream(on_segment, masked_heads=masked_heads, sent_under=sent_under)
        try:
            async with self._exchange("POST", "/generate", content, self._request_seconds) as response:
                if stream is None:
                    answer = read_json(await response.read())
                else:
                    await self._read_stream(response, stream)
        except EngineError as error:
            if stream is None or not stream.ids:
                raise
            received = stream.broken_off()
            self._received_tokens += received.num_tokens
            raise BrokenAnswerError(str(error), received) from error
        except DeadlineError:
            with contextlib.suppress(EngineError, DeadlineError):  # the deadline is the news, not that nobody listens
                await self.abort(request_id)
            raise
        if stream is None:
            generation = read_answer(answer, masked_heads=masked_heads, sent_under=sent_under)
        else:
            generation = stream.whole()
        self._received_tokens += generation.num_tokens
        return generation

    async def _pass_gate(self, request_id: str) -> bool:
        """Hold a request while we pause the engine; whether it may go (not, if it was aborted here)."""
        while self._paused:
            held = self._held[request_id] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._request_seconds):
                    if not await held:
                        return False
            except TimeoutError as error:
                raise DeadlineError(f"engine {self.url} to continue after a pause", self._request_seconds) from error
            finally:
                del self._held[request_id]
        return True

    def _release(self, error: EngineError | None = None) -> None:
        """Let the held requests go, or fail."""
        self._paused = False
        for held in self._held.values():
            if held.done():
                continue
            if error is None:
                held.set_result(True)
            else:
                held.set_exception(error)

    def _request(self, input_ids: Int32Array, sampling: SamplingParameters, rid: str, *, stream: bool) -> dict[str, Any]:
        return {
            "rid": rid,
            "input_ids": input_ids.tolist(),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop_token_ids": list(sampling.stop_token_ids),
                "sampling_seed": sampling.seed,
            },
            "return_logprob": True,
            "stream": stream,
            "extra_key": "" if self._version is None else str(self._version),
        }

    async def _read_stream(self, response: aiohttp.ClientResponse, stream: AnswerStream) -> None:
        """Read a stream to its end; once its last part has come, the connection's end does not matter."""
        try:
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                answer = read_json(data)
                if isinstance(answer, dict) and "error" in answer:
                    raise EngineError(f"{self.url}/generate: {error_text(data.decode())}")
                stream.add(answer)
        except aiohttp.ClientError:
            if not stream.is_complete:
                raise
        if not stream.is_complete:
            raise EngineError(f"{self.url}/generate: the stream ended before the answer did")

    async def abort(self, request_id: str) -> None:
        """End one request; its `generate` returns the partial answer (with SGLang not before the end of a pause)."""
        held = self._held.get(request_id)
        if held is not None:
            if not held.done():
                held.set_result(False)
            return
        await self._control("POST", "/abort_request", {"rid": request_id})

    async def pause(self, mode: PauseMode) -> None:
        """Stop at the next token boundary; whatever is called after that finds the engine standing still."""
        self._paused = True
        await self._control("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on generating."""
        await self._control("POST", "/continue_generation", {})
        self._release()

    async def update_weights(self, path: Path, version: WeightVersion, flush_cache: bool) -> None:
        """Load the weights in folder `path`, during a pause of ours.

        Raises:
            EngineError: if that fails. The weights are unknown from then on: the engine must be replaced.
        """
        if not self._paused:
            raise EngineError(f"{self.url}: pause generation before the update to {version}")
        if self._tensor_forms is not None:
            check_same_forms(self._tensor_forms, read_forms(path), str(path))
        if self._pinned is None:
            content = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush_cache}
            await self._update("/update_weights_from_disk", content, version)
        else:
            self._pinned.ask(path, version)
            await self._update("/begin_weight_update", {}, version)
            await self._update("/update_weights_from_tensor", self._pinned.body(version, flush_cache=flush_cache), version)
            await self._update("/end_weight_update", {}, version)
            self._pinned.check(version)
        self._version = version

    async def _update(self, route: str, content: dict[str, Any], version: WeightVersion) -> None:
        answer = await self._control("POST", route, content)
        if not answer.get("success"):
            raise EngineError(f"{self.url}: the update to {version} failed at {route}: {answer.get('message')}")

    async def weight_version(self) -> WeightVersion:
        """The version the engine says it serves.

        Raises:
            EngineError: also if it does not know.
        """
        answer = await self._control("GET", "/model_info", None)
        text = str(answer.get("weight_version"))
        if text == "unknown":
            raise EngineError(f"{self.url}: the engine's weights are unknown after a failed update; replace it")
        with protocol_kept(answer):
            return WeightVersion.parse(text)

    async def rank_reports(self) -> list[RankReport]:
        """What each rank of the engine holds, read back from its memory; empty if it cannot say.

        Raises:
            EngineError: the engine answered wrongly, or not at all.
        """
        if self._pinned is not None and self._version != self._first_version:
            return self._pinned.reports()
        if not self._reads_back:
            return []
        answer = await self._control("GET", "/rank_reports", None)
        with protocol_kept(answer):
            return [RankReport(**report) for report in answer.get("ranks", [])]

    async def score(self, token_ids: Sequence[int]) -> tuple[WeightVersion, list[float]]:
        """What the engine makes of given tokens, not during a pause.

        Args:
            token_ids: T of them, at least 2.

        Returns:
            The version that scored them, and T - 1 log-probs at temperature 1, of each token but the first.

        Raises:
            EngineError: the engine answered wrongly, or not at all.
            DeadlineError: it did not answer in time.
        """
        sampling = SamplingParameters(temperature=1.0, max_new_tokens=1, seed=0)
        content = self._request(np.asarray(token_ids, np.int32), sampling, uuid.uuid4().hex, stream=False)
        content |= {"logprob_start_len": 0}
        async with self._exchange("POST", "/generate", content, self._request_seconds) as response:
            return read_scores(await response.json(), len(token_ids))

    async def loads(self) -> EngineLoad:
        """How busy the engine is (summed over its data-parallel ranks)."""
        answer = await self._control("GET", "/v1/loads", None)
        parts = answer.get("loads") or []

        def total(name: str) -> int:
            return sum(int(part.get(name, 0)) for part in parts)

        def seconds(name: str) -> float:
            return sum(float(part.get(name, 0.0)) for part in parts)

        with protocol_kept(answer):
            # SGLang counts no tokens over its life; what came through this client is the next best
            generated = total("num_generated_tokens") or self._received_tokens
            return EngineLoad(
                total("num_running_reqs"),
                total("num_waiting_reqs") + len(self._held),
                total("num_used_tokens"),
                total("max_total_num_tokens"),
                generated,
                num_retractions=total("num_retracted_reqs"),
                prefill_seconds=seconds("prefill_seconds"),
                decode_seconds=seconds("decode_seconds"),
            )

    async def health(self) -> None:
        """Return if the engine is well.

        Raises:
            EngineError: if it is not, or does not answer.
        """
        await self._control("GET", "/health", None)

    async def _control(self, method: str, path: str, content: dict[str, Any] | None) -> dict[str, Any]:
        async with self._exchange(method, path, content, self._control_seconds) as response:
            text = await response.text()
            return json.loads(text) if text.startswith("{") else {}

    @contextlib.asynccontextmanager
    async def _bounded(self, seconds: float) -> AsyncIterator[None]:
        """A deadline, which `close` brings forward."""
        async with asyncio.timeout(seconds) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, path: str, content: dict[str, Any] | None, seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One HTTP exchange under a deadline; any trouble is an `EngineError` with the engine's own words."""
        if self._is_closed:
            raise EngineError(f"{self.url}{path}: the client was closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={**self._headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
                read_bufsize=1 << 20,
                cookie_jar=aiohttp.DummyCookieJar(),  # engines set none, and to look for some costs a tenth of a request
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            )
        try:
            data = None if content is None else msgspec.json.encode(content)
            async with self._bounded(seconds), self._session.request(method, self.url + path, data=data) as response:
                if response.status != 200:
                    text = error_text(await response.text())
                    if response.status == 401:
                        text += " (our token is not this engine's: it belongs to another run)"
                    raise EngineError(f"{self.url}{path} answered {response.status}: {text}")
                yield response
        except TimeoutError as error:
            if self._is_closed:
                raise EngineError(f"{self.url}{path}: the client was closed") from error
            raise DeadlineError(f"engine {self.url}{path}", seconds) from error
        except RuntimeError as error:
            if not self._is_closed:
                raise
            raise EngineError(f"{self.url}{path}: the client was closed") from error  # aiohttp's word for it, mid-read
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error


def read_json(data: bytes) -> Any:
    """The value; by the fast reader, unless an engine writes NaN."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return json.loads(data)


def error_text(text: str) -> str:
    """The message inside an error answer, or the answer itself."""
    try:
        content = json.loads(text)
    except ValueError:
        return text[:2000]
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)
