"""Run the application on a socket until a signal ends it: within a second, whatever is open."""

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

# Seconds in which questions that are open hear that the server stops.
_GRACE_S = 0.2


def run_server(app: ASGIApp, listening: socket.socket, workers: Workers) -> None:
    """Serve `app`; KeyboardInterrupt tells of the signal that ended it."""

    async def without_refused(scope: Scope, receive: Receive, send: Send) -> None:
        # Where uvicorn has refused the rest of a request, it takes no answer to its beginning.
        with suppress(h11.LocalProtocolError):
            await app(scope, receive, send)

    config = uvicorn.Config(without_refused, http="h11", log_level="warning", access_log=False)
    _Server(config, workers).run([listening])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, workers: Workers) -> None:
        super().__init__(config)
        self._workers = workers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._workers.close()
        await asyncio.sleep(_GRACE_S)
        # Else it would wait for clients that do not send or read on.
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)
