"""SGLang's HTTP protocol over an engine of ours.

Every call needs the bearer token; an update also the run's id. Errors come as `{"error": {"message": …}}`: 400 for a
request that can never be answered, 409 for one that must wait, 503 while the weights are unknown. This module knows
neither sampling nor scheduling, and no torch.
"""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from laminar.errors import ConfigError, EngineError
from rollout.engines.door import EngineDoor
from rollout.engines.wire import RUN_HEADER, AbortWire, GenerateWire, PauseWire, UpdateWire

MAX_BODY_BYTES = 256 << 20
CLOSE_SECONDS = 0.01
"""What an answer that is on its way gets at the end; 0 would mean for ever."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = TypeVar("Body", bound=msgspec.Struct)


class EngineServer:
    """The routes over one engine.

    Args:
        door: the way to the engine.
        token: what callers must present.
        run_id: the run that may change the weights; empty: any.
    """

    def __init__(self, door: EngineDoor, *, token: str, run_id: str) -> None:
        self._door = door
        self._token = token
        self._run_id = run_id

    def application(self) -> web.Application:
        """The aiohttp application."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        application.router.add_post("/generate", self.generate)
        application.router.add_post("/abort_request", self.abort_request)
        application.router.add_post("/pause_generation", self.pause_generation)
        application.router.add_post("/continue_generation", self.continue_generation)
        application.router.add_post("/update_weights_from_disk", self.update_weights_from_disk)
        application.router.add_post("/flush_cache", self.flush_cache)
        application.router.add_get("/v1/loads", self.loads)
        application.router.add_get("/health", self.health)
        application.router.add_get("/model_info", self.model_info)
        application.router.add_get("/rank_reports", self.rank_reports)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token; turn our errors into answers."""
        presented = request.headers.get("Authorization", "")
        if not hmac.compare_digest(presented.encode(), f"Bearer {self._token}".encode()):
            return refusal(401, "the bearer token is missing or not this engine's; this engine belongs to another run")
        try:
            return await handler(request)
        except ConfigError as error:
            return refusal(400, str(error))
        except EngineError as error:
            return refusal(503, str(error))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; a caller that goes away aborts it."""
        wire = await body(request, GenerateWire)
        try:
            updates = await self._door.generate(wire)
            if wire.stream:
                return await self._stream(request, updates)
            update = await updates.get()
            return refusal(500, update.error) if update.answer is None else encoded(update.answer)
        except (asyncio.CancelledError, ConnectionError):
            await asyncio.shield(self._door.call(lambda book: book.abort(wire.rid)))
            raise

    async def _stream(self, request: web.Request, updates: asyncio.Queue) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        finished = False
        while not finished:
            update = await updates.get()
            finished = update.finished
            content = {"error": {"message": update.error}} if update.answer is None else update.answer
            await response.write(b"data: " + msgspec.json.encode(content) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def abort_request(self, request: web.Request) -> web.StreamResponse:
        """End one request, or all; they answer with what they have."""
        wire = await body(request, AbortWire)
        if not wire.rid and not wire.abort_all:
            raise ConfigError("name a rid, or set abort_all")
        await asyncio.shield(self._door.call(lambda book: book.abort(None if wire.abort_all else wire.rid)))
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.StreamResponse:
        """Stop at the next token boundary; the answer comes when it has stopped."""
        wire = await body(request, PauseWire)
        await self._door.call(lambda book: book.pause(wire.mode))
        return encoded({"message": "generation is paused", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.StreamResponse:
        """Go on."""
        await self._door.call(lambda book: book.resume())
        return encoded({"message": "generation goes on", "status": "ok"})

    async def update_weights_from_disk(self, request: web.Request) -> web.StreamResponse:
        """Load other weights; refused to other runs, and while requests run unpaused."""
        presented = request.headers.get(RUN_HEADER, "")
        if self._run_id and presented != self._run_id:
            return refusal(403, f"this engine belongs to run {self._run_id!r}, not {presented!r}; update your own engine")
        wire = await body(request, UpdateWire)
        try:
            await self._door.call(
                lambda book: book.update_weights(Path(wire.model_path), wire.weight_version, wire.flush_cache)
            )
        except ConfigError as error:
            return encoded({"success": False, "message": str(error), "num_paused_requests": 0}, status=409)
        except EngineError as error:
            return encoded({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        load = self._door.load
        return encoded(
            {
                "success": True,
                "message": f"serving {wire.weight_version}",
                "num_paused_requests": load.running + load.waiting,
            }
        )

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        """Drop all cached keys and values."""
        await self._door.call(lambda book: book.flush_cache())
        return web.Response(text="cache flushed\n")

    async def loads(self, request: web.Request) -> web.StreamResponse:
        """How busy the engine is, as of its last step."""
        load = self._door.load
        core = {
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.used_tokens,
            "max_total_num_tokens": load.capacity_tokens,
            "num_generated_tokens": load.generated_tokens,
            "num_retracted_reqs": load.num_retractions,
            "prefill_seconds": load.prefill_seconds,
            "decode_seconds": load.decode_seconds,
        }
        return encoded({"loads": [core]})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 while the engine's thread lives."""
        return web.Response() if self._door.alive else refusal(503, "the engine's thread has died; see its log")

    async def model_info(self, request: web.Request) -> web.StreamResponse:
        """What is served."""
        folder, version, known = await self._door.call(lambda book: (str(book.folder), book.version, book.weights_known))
        return encoded({"model_path": folder, "weight_version": version if known else "unknown", "is_generation": True})

    async def rank_reports(self, request: web.Request) -> web.StreamResponse:
        """What each rank holds, read back from its memory."""
        return encoded({"ranks": await self._door.call(lambda book: book.read_back())})


async def body(request: web.Request, form: type[Body]) -> Body:
    """The request's JSON as `form`.

    Raises:
        ConfigError: if it is not of that form.
    """
    content = await request.read()
    try:
        return msgspec.json.decode(content or b"{}", type=form)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{request.path}: {error}") from error


def encoded(content: object, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def refusal(status: int, message: str) -> web.Response:
    """An error in the protocol's form."""
    return encoded({"error": {"message": message}}, status)


@contextlib.asynccontextmanager
async def listening(server: EngineServer, host: str, port: int) -> AsyncIterator[str]:
    """Serve until the block ends; yields the URL. Port 0: any free one."""
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    try:
        listener = socket.create_server((host, port), backlog=1024)
        await web.SockSite(runner, listener).start()
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        await runner.cleanup()
