"""Connections to the data module's server, which may be ours or any other that speaks the Redis protocol.

Invariants: every wait on the network has a deadline; a password never appears in a message. A connection does not retry by
itself: retrying is safe only around a whole idempotent request, so `ExperienceStore` does it.

This module does not know what is stored.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from laminar.config.addresses import port_fault
from laminar.errors import ConfigError, EnvironmentSetupError, reason

T = TypeVar("T")

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
"""Longest wait for one answer; a script takes milliseconds, a 64 MB payload over a network takes seconds."""
READ_BYTES = 1024 * 1024
PAUSE_SECONDS = 0.1
MAX_CONNECTIONS = 16
NEEDED_POLICY = "noeviction"


async def keep_cancellation(request: Awaitable[T]) -> T:
    """Await a request; if its task is cancelled meanwhile, be cancelled, whatever the request makes of it.

    Redis clients send through `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes as the send
    ends (CPython issue 86296). A loop would then never stop, and its task group wait for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        return await request
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


class _Pipeline(Pipeline):
    """Keeps cancellations."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        return await keep_cancellation(super().execute(raise_on_error))


class _Client(Redis):
    """A client whose commands and pipelines keep cancellations."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await keep_cancellation(super().execute_command(*args, **options))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


async def connect(url: str, *, patience_seconds: float = 0.0) -> Redis:
    """A client whose server has answered once.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with user, password and database as redis-py reads them.
        patience_seconds: how long to ask again while nobody answers, for processes of a run whose server may be restarting.

    Raises:
        ConfigError: the URL cannot be read.
        EnvironmentSetupError: nobody answers there, or the password is refused.
    """
    if fault := url_fault(url):
        raise ConfigError(f"experience.redis_url {hide_password(url)!r}: {fault}")
    client = _Client.from_pool(_pool(url))
    try:
        await _answer(client, patience_seconds)
    except (redis.RedisError, OSError) as error:
        await client.aclose()
        raise EnvironmentSetupError(
            f"no usable Redis at {hide_password(url)} ({reason(error).rstrip('.')}); start one there, "
            'correct experience.redis_url, or set it to "embedded" for the bundled server'
        ) from error
    return client


def url_fault(url: str) -> str | None:
    """What is wrong with the URL of a server, found without asking it; None if nothing is."""
    parts = url.partition("://")
    if parts[0] not in ("redis", "rediss", "unix") or not parts[2]:
        return "write a URL that starts with redis://, rediss:// or unix://"
    if fault := port_fault(url):
        return fault
    try:
        _pool(url).make_connection()
    except (ValueError, TypeError, redis.RedisError) as error:
        return f"what stands behind its ? cannot be used ({error}); correct or remove it"
    return None


def _pool(url: str) -> BlockingConnectionPool:
    return BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=ANSWER_SECONDS,
        socket_timeout=ANSWER_SECONDS,
        socket_read_size=READ_BYTES,
        socket_connect_timeout=CONNECT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


async def _answer(client: Redis, patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            await client.ping()
            return
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(PAUSE_SECONDS)


async def check_server(client: Redis) -> None:
    """Refuse a server that could lose data silently.

    Raises:
        EnvironmentSetupError: the server may evict keys, runs in cluster mode, or is too old for our scripts.
    """
    server = await client.info("server")
    memory = await client.info("memory")
    version = str(server.get("redis_version", "0"))
    if int(version.partition(".")[0]) < 7:
        raise EnvironmentSetupError(f"Redis {version} is too old: Laminar needs Redis 7 or Valkey, or the bundled server")
    if server.get("redis_mode", server.get("server_mode")) == "cluster":
        raise EnvironmentSetupError(
            "Redis runs in cluster mode, but one script must see all keys of a run: "
            "point experience.redis_url to a single server"
        )
    policy = str(memory.get("maxmemory_policy", NEEDED_POLICY))
    if policy != NEEDED_POLICY:
        raise EnvironmentSetupError(
            f"Redis has maxmemory-policy {policy}, which may delete trajectories: "
            f"run `redis-cli config set maxmemory-policy {NEEDED_POLICY}` there, or use another server"
        )


def hide_password(url: str) -> str:
    """The URL for messages: a password in it, or among its options, is starred."""
    try:
        parts = urlsplit(url)
    except ValueError:  # no URL, so nobody can say what in it is a password
        return "***"
    shown = url
    if "@" in parts.netloc:
        user, colon, _ = parts.netloc.rpartition("@")[0].partition(":")
        shown = url.replace(parts.netloc, f"{user}{colon}{'***' if colon else ''}@{parts.netloc.rpartition('@')[2]}", 1)
    return shown if "password=" not in shown else shown.partition("password=")[0] + "password=***"
