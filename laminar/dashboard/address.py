"""Where the dashboard is: the process that binds the port says so, and an error names who holds it.

It knows neither pages nor runs, and brings no web server.
"""

import contextlib
import os
import socket
from pathlib import Path

from laminar.dashboard.guard import ANY_ADDRESS, LOOPBACK_HOSTS
from laminar.errors import EnvironmentSetupError

BACKLOG = 128


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one.

    Raises:
        EnvironmentSetupError: the port is taken; names its owner.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        owner = port_owner(port) if port else ""
        taken = f"; {owner} listens there" if owner else ""
        raise EnvironmentSetupError(
            f"dashboard.port {port} on {host} cannot be used ({error.strerror}){taken}; choose another, or 0 for any"
        ) from error
    return listening


def url_of(listening: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def allowed_hosts(host: str) -> frozenset[str]:
    """The names by which a dashboard bound to `host` may be called: loopback, and that name; or the machine's, and numbers.

    Who binds all addresses is called by any of them, also by one that only a container's host or a cluster knows.
    """
    named = f"[{host}]" if ":" in host else host.lower()
    own = {socket.gethostname().lower(), socket.getfqdn().lower(), ANY_ADDRESS}
    extra = own if host in ("0.0.0.0", "::") else {named}
    return LOOPBACK_HOSTS | extra


def port_owner(port: int) -> str:
    """`NAME (process ID)` of who listens on a TCP port of this machine; empty if that cannot be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for entry in os.listdir("/proc") if inodes else ():
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                for number in os.listdir(f"/proc/{entry}/fd"):
                    if os.readlink(f"/proc/{entry}/fd/{number}") in inodes:
                        name = Path(f"/proc/{entry}/comm").read_text().strip()
                        return f"{name} (process {entry})"
    return ""
