"""The dashboard's addresses. Each reads; `POST /api/control` alone acts, and only with the run's token.

Files are served from a literal table and logs by role names that are listed, so no path comes from a request.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib import resources
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Query
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from laminar.control import Verb, ask_run
from laminar.dashboard.guard import LOOPBACK_HOSTS, Guard
from laminar.dashboard.search import Search, search
from laminar.dashboard.source import RunSource
from laminar.errors import ConfigError, LaminarError

EVENT_SECONDS = 1.0
MAX_STREAMS = 32
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
PAGES = ("overview", "timeline", "staleness", "rollouts", "weights", "trajectories", "alerts", "config", "logs")
FILES = (
    "index.html", "style.css", "app.js", "charts.js", "dom.js", "icon.svg", "vendor/uPlot.js", "vendor/uPlot.css",
    *(f"pages/{page}.js" for page in PAGES),
)  # fmt: skip


class Order(BaseModel):
    """A control request of the page."""

    model_config = ConfigDict(extra="forbid", strict=True)
    verb: str = Field(max_length=16)
    arguments: dict[str, Annotated[str, Field(max_length=200)]] = Field(default_factory=dict, max_length=4)


def make_app(source: RunSource, hosts: frozenset[str] = LOOPBACK_HOSTS) -> Guard:
    """The guarded application; its lifespan keeps the live feed going."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(source.read()), asyncio.create_task(source.feed.run())]
        yield
        for task in tasks:
            task.cancel()

    app = FastAPI(title="Laminar", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    add_files(app)
    add_readings(app, source)
    add_stream(app, source)
    add_control(app, source)
    return Guard(app, hosts)


def add_files(app: FastAPI) -> None:
    """The page itself."""
    folder = resources.files("laminar.dashboard") / "static"
    table = {name: (folder / name).read_bytes() for name in FILES}

    @app.get("/")
    async def index() -> Response:
        return Response(table["index.html"], media_type=TYPES["html"])

    @app.get("/static/{name:path}")
    async def file(name: str) -> Response:
        if name not in table:
            raise HTTPException(404, "there is no such file")
        return Response(table[name], media_type=TYPES[name.rpartition(".")[2]])


def add_readings(app: FastAPI, source: RunSource) -> None:
    """What the page reads."""

    @app.get("/api/state")
    async def state() -> dict[str, Any]:
        return source.state()

    @app.get("/api/history")
    async def history(
        names: Annotated[str, Query(max_length=2000)] = "*", points: Annotated[int, Query(ge=1, le=5000)] = 600
    ) -> dict[str, Any]:
        await source.is_read.wait()
        source.history.refresh()
        patterns = names.split(",")
        wanted = [name for name in source.history.columns if any(fnmatchcase(name, pattern) for pattern in patterns)]
        thinned = await asyncio.to_thread(source.history.thinned, points, wanted)
        return {**thinned, "evaluations": source.history.evaluations, "marks": source.history.marks[-200:]}

    @app.get("/api/timeline")
    async def timeline(seconds: Annotated[float, Query(ge=1, le=900)] = 120) -> dict[str, Any]:
        return source.timeline(seconds)

    @app.get("/api/replicas")
    async def replicas() -> dict[str, Any]:
        return source.replicas()

    @app.get("/api/trajectories")
    async def trajectories(wanted: Annotated[Search, Query()]) -> dict[str, Any]:
        found = await asyncio.to_thread(source.trajectories.summaries)
        chosen = search(found, wanted)
        return {"num_kept": len(found), "num_found": len(chosen), "rows": [asdict(row) for row in chosen[: wanted.limit]]}

    @app.get("/api/trajectories/{trajectory_id}")
    async def trajectory(trajectory_id: str) -> dict[str, Any]:
        summary = await asyncio.to_thread(source.trajectories.find, trajectory_id)
        record = None if summary is None else await asyncio.to_thread(source.trajectories.read, summary)
        if record is None:
            raise HTTPException(404, "there is no record of this trajectory")
        return record

    @app.get("/api/config")
    async def config() -> PlainTextResponse:
        return PlainTextResponse(source.config_text())

    @app.get("/api/logs")
    async def logs(
        role: Annotated[str, Query(max_length=64)] = "", lines: Annotated[int, Query(ge=1, le=2000)] = 200
    ) -> dict[str, Any]:
        try:
            found = await asyncio.to_thread(source.log_lines, role, lines)
        except ConfigError as error:
            raise HTTPException(404, str(error)) from None
        return {"roles": sorted(file.stem for file in source.folder.logs.glob("*.log")), "lines": found}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        text = await asyncio.to_thread(source.prometheus)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def add_stream(app: FastAPI, source: RunSource) -> None:
    """Server-sent events: the state, once a second."""
    open_streams = asyncio.Semaphore(MAX_STREAMS)

    async def events() -> AsyncIterator[str]:
        async with open_streams:
            yield "retry: 2000\n\n"
            while True:
                yield f"event: state\ndata: {json.dumps(source.state())}\n\n"
                await asyncio.sleep(EVENT_SECONDS)

    @app.get("/api/events")
    async def stream() -> StreamingResponse:
        if open_streams.locked():
            raise HTTPException(503, f"{MAX_STREAMS} pages are open already")
        return StreamingResponse(events(), media_type="text/event-stream")


def add_control(app: FastAPI, source: RunSource) -> None:
    """Control of the run, for who holds its token."""

    @app.post("/api/control")
    async def control(order: Order, x_laminar_token: Annotated[str, Header(max_length=200)] = "") -> dict[str, str]:
        if not hmac.compare_digest(x_laminar_token.encode(), source.folder.read_state().token.encode()):
            raise HTTPException(403, "the token is not the run's: `laminar dashboard RUN --token` shows it")
        if order.verb not in list(Verb):
            raise HTTPException(422, f"{order.verb!r} is not one of {', '.join(Verb)}")
        try:
            return {"text": await ask_run(source.folder, Verb(order.verb), order.arguments, "dashboard")}
        except LaminarError as error:
            raise HTTPException(409, str(error)) from None
