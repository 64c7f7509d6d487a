"""The torch engine behind SGLang's HTTP protocol: `python -m rollout.engines.server --model PATH --weight-version 0.0`.

Every call needs the bearer token; an update also the run's id. Errors come as `{"error": {"message": …}}`: 400 for a
request that can never be answered, 409 for one that must wait, 503 while the weights are unknown. The bound port is written
to `--ready-fd` as one JSON line. The process ends when its parent does. This module knows neither sampling nor scheduling.
"""

import argparse
import asyncio
import hmac
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from aiohttp import web

from laminar.errors import ConfigError, EngineError
from rollout.engines.engine_loop import EngineLoop
from rollout.engines.lifeline import die_with_parent
from rollout.engines.torch_engine import EngineOptions, TorchEngine
from rollout.engines.wire import AbortWire, GenerateWire, PauseWire, UpdateWire

MAX_BODY_BYTES = 256 << 20
TOKEN_VARIABLE = "LAMINAR_ENGINE_TOKEN"
RUN_HEADER = "X-Laminar-Run"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = TypeVar("Body", bound=msgspec.Struct)


class EngineServer:
    """The routes over one engine loop.

    Args:
        engine_loop: the engine.
        token: what callers must present.
        run_id: the run that may change the weights; empty: any.
    """

    def __init__(self, engine_loop: EngineLoop, *, token: str, run_id: str) -> None:
        self._loop = engine_loop
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
        updates = await self._loop.generate(wire)
        try:
            if wire.stream:
                return await self._stream(request, updates)
            update = await updates.get()
            return refusal(500, update.error) if update.answer is None else encoded(update.answer)
        except (asyncio.CancelledError, ConnectionError):
            await asyncio.shield(self._loop.call(lambda engine: engine.abort(wire.rid)))
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
        await self._loop.call(lambda engine: engine.abort(None if wire.abort_all else wire.rid))
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.StreamResponse:
        """Stop at the next token boundary; the answer comes when it has stopped."""
        wire = await body(request, PauseWire)
        await self._loop.call(lambda engine: engine.pause(wire.mode))
        return encoded({"message": "generation is paused", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.StreamResponse:
        """Go on."""
        await self._loop.call(lambda engine: engine.resume())
        return encoded({"message": "generation goes on", "status": "ok"})

    async def update_weights_from_disk(self, request: web.Request) -> web.StreamResponse:
        """Load other weights; refused to other runs, and while requests run unpaused."""
        presented = request.headers.get(RUN_HEADER, "")
        if self._run_id and presented != self._run_id:
            return refusal(403, f"this engine belongs to run {self._run_id!r}, not {presented!r}; update your own engine")
        wire = await body(request, UpdateWire)
        try:
            await self._loop.call(
                lambda engine: engine.update_weights(Path(wire.model_path), wire.weight_version, wire.flush_cache)
            )
        except ConfigError as error:
            return encoded({"success": False, "message": str(error), "num_paused_requests": 0}, status=409)
        except EngineError as error:
            return encoded({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        load = self._loop.load
        return encoded(
            {
                "success": True,
                "message": f"serving {wire.weight_version}",
                "num_paused_requests": load.running + load.waiting,
            }
        )

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        """Drop all cached keys and values."""
        await self._loop.call(lambda engine: engine.flush_cache())
        return web.Response(text="cache flushed\n")

    async def loads(self, request: web.Request) -> web.StreamResponse:
        """How busy the engine is, as of its last step."""
        load = self._loop.load
        core = {
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.used_tokens,
            "max_total_num_tokens": load.capacity_tokens,
            "num_generated_tokens": load.generated_tokens,
        }
        return encoded({"loads": [core]})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 while the engine's thread lives."""
        return web.Response() if self._loop.alive else refusal(503, "the engine's thread has died; see its log")

    async def model_info(self, request: web.Request) -> web.StreamResponse:
        """What is served."""
        folder, version, known = await self._loop.call(lambda e: (str(e.folder), e.version, e.weights_known))
        return encoded({"model_path": folder, "weight_version": version if known else "unknown", "is_generation": True})


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


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="rollout.engines.server", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="HF checkpoint folder")
    parser.add_argument("--weight-version", required=True, help="name of its weights, such as 0.0")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument(
        "--token", default=os.environ.get(TOKEN_VARIABLE, ""), help=f"bearer token; default: ${TOKEN_VARIABLE}"
    )
    parser.add_argument("--run-id", default="", help="the run that may change the weights")
    parser.add_argument("--max-running", type=int, default=64, help="requests decoded at once")
    parser.add_argument("--max-cached-tokens", type=int, default=65536, help="capacity of the key-value store")
    parser.add_argument("--max-prefill-tokens", type=int, default=4096, help="tokens prefilled in one step")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--batch-invariant", action="store_true", help="same numbers however many requests run")
    parser.add_argument("--ready-fd", type=int, default=-1, help="descriptor that gets one JSON line once the port is bound")
    parser.add_argument("--lifeline", action="store_true", help="end with the parent, or when standard input ends")
    return parser.parse_args(arguments)


async def serve(options: argparse.Namespace) -> None:
    """Bind, announce the port, and serve until the engine's thread dies of a bug."""
    limits = EngineOptions(
        options.max_running, options.max_cached_tokens, options.max_prefill_tokens, batch_invariant=options.batch_invariant
    )
    engine = TorchEngine(options.model, options.weight_version, limits)
    crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    engine_loop = EngineLoop(engine, asyncio.get_running_loop(), crashed.set_exception)
    server = EngineServer(engine_loop, token=options.token, run_id=options.run_id)
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    listener = socket.create_server((options.host, options.port), backlog=1024)
    await web.SockSite(runner, listener).start()
    announce(options.ready_fd, options.host, listener.getsockname()[1])
    await crashed


def announce(descriptor: int, host: str, port: int) -> None:
    """Tell the parent where we listen."""
    line = json.dumps({"url": f"http://{host}:{port}", "pid": os.getpid()})
    print(f"listening: {line}", file=sys.stderr, flush=True)
    if descriptor >= 0:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(line + "\n")


def main() -> int:
    """Entry point; returns the exit code."""
    options = parse(sys.argv[1:])
    if options.lifeline:
        die_with_parent()
    if not options.token:
        print(f"error: set ${TOKEN_VARIABLE} or --token; an engine without a token would obey anybody", file=sys.stderr)
        return ConfigError.exit_code
    torch.set_num_threads(options.threads)
    try:
        asyncio.run(serve(options))
    except (ConfigError, EngineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
