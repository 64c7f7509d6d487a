"""What stands before every answer of the dashboard: who may ask, how much, and what a page may do.

Invariants: a request whose `Host` is not ours (DNS rebinding), or whose `Origin` is another page's, is refused; a body above
`MAX_BODY_BYTES` is refused before it is read; every answer carries a policy under which a page loads nothing from elsewhere.
"""

import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 16_384
MAX_QUERY_BYTES = 4096
ANY_ADDRESS = "any address"
"""Among the names: numeric addresses too. A page that rebinds a name of its own to us cannot send one as its `Host`."""
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
METHODS = frozenset({"GET", "HEAD", "POST"})

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class Guard:
    """Wraps an ASGI application.

    Args:
        application: what is guarded.
        hosts: names by which it may be called, without port; `ANY_ADDRESS` stands for all numeric ones.
    """

    def __init__(self, application: Application, hosts: frozenset[str] = LOOPBACK_HOSTS) -> None:
        self._application, self._hosts = application, hosts - {ANY_ADDRESS}
        self._takes_addresses = ANY_ADDRESS in hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal:
            await _refuse(send_with_headers, *refusal)
            return
        body = await _read(receive) if scope["method"] == "POST" else b""
        if body is None:
            await _refuse(send_with_headers, 413, f"a request may have {MAX_BODY_BYTES} bytes")
            return
        given = False

        async def receive_body() -> MutableMapping[str, Any]:
            nonlocal given
            if given or scope["method"] != "POST":
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._application(scope, receive_body, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        name = host_name(host)
        if name not in self._hosts and not (self._takes_addresses and is_address(name)):
            return 421, "this dashboard does not go by that name"
        if scope["method"] not in METHODS:
            return 405, f"{scope['method']} is not served"
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, "another page may not ask this dashboard"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["method"] == "POST":
            return 403, "another page may not ask this dashboard"
        if len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
            return 414, "the query is too long"
        return None


def host_name(host: str) -> str:
    """A `Host` header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def is_address(name: str) -> bool:
    """Whether a host's name is a numeric address."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


async def _read(receive: Receive) -> bytes | None:
    """The body; None if it is too long."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return body


async def _refuse(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
