"""Run the application on a socket until a signal ends it: within a second, whatever is open."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette

from shardwise.web.workers import Workers

# Seconds in which questions that are open hear that the server stops.
_GRACE_S = 0.2


def run_server(app: Starlette, listening: socket.socket, workers: Workers) -> None:
    """Serve `app`; KeyboardInterrupt tells of the signal that ended it."""
    config = uvicorn.Config(app, log_level="warning", access_log=False)
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
