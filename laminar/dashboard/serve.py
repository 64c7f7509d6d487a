"""Serving the dashboard on a socket that is bound already."""

import socket

import uvicorn

from laminar.dashboard.guard import Guard


def serve(app: Guard, listening: socket.socket) -> None:
    """Serve until a signal."""
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1)
    )
    server.run(sockets=[listening])
