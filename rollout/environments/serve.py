"""Serves environments over HTTP: `python -m rollout.environments.serve --kind my_world:SecondChance [--port 8100]`.

Any environment, ours or yours, for environment `remote` (`rollout.environments.remote_wire` says what is sent).
Invariants: a call runs once, however often it comes, and goes on though its caller has hung up; calls of one episode come in
their order; every environment is closed once, at the latest when nobody has called for `idle_seconds`, or the server ends.
It does not know tokens, rewards or runs.
"""

import argparse
import asyncio
import hmac
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from laminar.config.system import EnvironmentConfig
from laminar.types import FailureKind
from rollout.boundary import EpisodeError, guard
from rollout.environments.base import Environment
from rollout.environments.factory import EnvironmentFactory, build_environment_factory
from rollout.environments.remote_wire import Body, WireError, error_body, observation_body, read_prompt, step_body

_MAX_BODY_BYTES = 64 * 1024**2
_CLOSE_SECONDS = 10.0


@dataclass(slots=True)
class _Episode:
    """One environment; `call` is the last one, `number` its number."""

    environment: Environment
    number: int
    call: "asyncio.Task[Body]"
    used_at: float = field(default_factory=time.monotonic)


class EnvironmentServer:
    """Serves one kind of environment.

    Args:
        make_environment: makes one for an episode.
        max_episodes: open at once; further resets are answered 503.
        idle_seconds: an episode that nobody calls is closed.
        call_seconds: deadline of one call of the environment.
        token: callers must show it; empty: none is asked for.
    """

    def __init__(
        self,
        make_environment: EnvironmentFactory,
        *,
        max_episodes: int = 1024,
        idle_seconds: float = 900.0,
        call_seconds: float = 600.0,
        token: str = "",
    ) -> None:
        self._make = make_environment
        self._max_episodes, self._idle_seconds, self._call_seconds = max_episodes, idle_seconds, call_seconds
        self._token = token
        self._episodes: dict[str, _Episode] = {}

    @property
    def num_open(self) -> int:
        """Episodes that are not closed."""
        return len(self._episodes)

    @asynccontextmanager
    async def open(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen meanwhile; yields the URL."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes([web.post(f"/{name}", self._handle) for name in ("reset", "step", "close")])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        sweep = asyncio.create_task(self._sweep())
        try:
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            sweep.cancel()
            await asyncio.gather(*[self._close(episode_id) for episode_id in list(self._episodes)])
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._token and not hmac.compare_digest(shown.encode(), self._token.encode()):
            return web.json_response(error_body(FailureKind.USER_BUG, "this server's token is another one"), status=401)
        try:
            body = json.loads(await request.read())
            if not isinstance(body, dict) or not isinstance(body.get("id"), str):
                raise WireError('the body must be a table with a text "id"')
            return await self._answer(request.path.removeprefix("/"), body)
        except (WireError, ValueError) as error:
            return web.json_response(error_body(FailureKind.USER_BUG, str(error)), status=400)
        except EpisodeError as error:
            return web.json_response(error_body(error.failure.kind, error.failure.text), status=500)

    async def _answer(self, name: str, body: Body) -> web.Response:
        episode_id, number = body["id"], body.get("number")
        if name == "close":
            await self._close(episode_id)
            return web.json_response({})
        episode = self._episodes.get(episode_id)
        if name == "reset" and episode is None:
            if len(self._episodes) >= self._max_episodes:
                return web.json_response({}, status=503)
            episode = self._begin(episode_id, body)
        if episode is None:
            text = f"episode {episode_id} is not open here; it was closed, or the server restarted"
            return web.json_response(error_body(FailureKind.ENVIRONMENT, text), status=404)
        if name == "step" and number == episode.number + 1 and episode.call.done():
            self._step(episode, number, str(body.get("completion", "")))
        if number != episode.number:
            raise WireError(f"call {number!r} cannot follow call {episode.number}")
        episode.used_at = time.monotonic()
        return web.json_response(await asyncio.shield(episode.call))

    def _begin(self, episode_id: str, body: Body) -> _Episode:
        prompt, environment = read_prompt(body.get("prompt")), self._make()

        async def reset() -> Body:
            shown = await self._guarded("reset", lambda: environment.reset(prompt))
            return {"observation": _converted("reset", observation_body, shown)}

        self._episodes[episode_id] = _Episode(environment, 0, asyncio.create_task(reset()))
        return self._episodes[episode_id]

    def _step(self, episode: _Episode, number: int, completion: str) -> None:
        async def step() -> Body:
            result = await self._guarded("step", lambda: episode.environment.step(completion))
            return _converted("step", step_body, result)

        episode.number, episode.call = number, asyncio.create_task(step())

    async def _guarded(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        return await guard(
            call,
            what=f"environment {name}",
            kind=FailureKind.ENVIRONMENT,
            seconds=self._call_seconds,
            timeout_kind=FailureKind.ENVIRONMENT,
            limit="--call-seconds",
        )

    async def _close(self, episode_id: str) -> None:
        episode = self._episodes.pop(episode_id, None)
        if episode is None:
            return
        episode.call.cancel()
        await asyncio.wait({episode.call})
        try:
            await guard(
                episode.environment.close,
                what="environment close",
                kind=FailureKind.ENVIRONMENT,
                seconds=_CLOSE_SECONDS,
                timeout_kind=FailureKind.ENVIRONMENT,
                limit="its time",
            )
        except EpisodeError as error:
            print(f"episode {episode_id}: {error}", file=sys.stderr)

    async def _sweep(self) -> None:
        """Close what nobody calls any more."""
        while True:
            await asyncio.sleep(self._idle_seconds / 4)
            latest = time.monotonic() - self._idle_seconds
            idle = [name for name, episode in self._episodes.items() if episode.call.done() and episode.used_at < latest]
            await asyncio.gather(*[self._close(episode_id) for episode_id in idle])


def _converted(name: str, convert: Callable[[Any], Body], value: Any) -> Body:
    try:
        body = convert(value)
        json.dumps(body)
    except (AttributeError, TypeError, ValueError) as error:
        text = f"environment {name} returned {value!r:.80}, which cannot be sent: {error}"
        raise EpisodeError(FailureKind.USER_BUG, text) from error
    return body


async def serve(server: EnvironmentServer, host: str, port: int) -> None:
    """Serve until cancelled."""
    async with server.open(host, port) as url:
        print(f"serving at {url}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serve one kind of environment until interrupted."""
    parser = argparse.ArgumentParser(description="Serve environments over HTTP.")
    parser.add_argument("--kind", required=True, help="as `environment.kind`")
    parser.add_argument("--options", default="{}", help="as `environment.options`, as JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--max-episodes", type=int, default=1024)
    parser.add_argument("--idle-seconds", type=float, default=900.0)
    parser.add_argument("--call-seconds", type=float, default=600.0)
    parser.add_argument("--token-variable", default="", help="environment variable with a token that callers must show")
    arguments = parser.parse_args()
    sys.path.append(str(Path.cwd()))
    config = EnvironmentConfig(kind=arguments.kind, options=json.loads(arguments.options))
    server = EnvironmentServer(
        build_environment_factory(config),
        max_episodes=arguments.max_episodes,
        idle_seconds=arguments.idle_seconds,
        call_seconds=arguments.call_seconds,
        token=os.environ[arguments.token_variable] if arguments.token_variable else "",
    )
    try:
        asyncio.run(serve(server, arguments.host, arguments.port))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
