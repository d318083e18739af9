"""Serve the application on a socket until a signal ends it.

It ends within a second, even with open connections.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import h11
import uvicorn

from shardwise.web.workers import Workers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

# Seconds in which open requests are told that the server stops.
_GRACE_S = 0.2


def run_server(app: ASGIApp, listening: socket.socket, workers: Workers) -> None:
    """Serve `app` on a listening socket until a signal ends it; raises KeyboardInterrupt then."""

    async def without_refused(scope: Scope, receive: Receive, send: Send) -> None:
        # After uvicorn has refused the rest of a request, it accepts no response to that request.
        with suppress(h11.LocalProtocolError):
            await app(scope, receive, send)

    config = uvicorn.Config(without_refused, http="h11", log_level="warning", access_log=False)
    _Server(config, workers).run([listening])


class _Server(uvicorn.Server):
    """A server that on shutdown kills its workers and closes open connections."""

    def __init__(self, config: uvicorn.Config, workers: Workers) -> None:
        super().__init__(config)
        self._workers = workers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._workers.close()
        await asyncio.sleep(_GRACE_S)
        # Otherwise shutdown would wait for clients that stall.
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)
