"""The planner behind a server on this machine: the same page, planning in Python."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shardwise.web.local_runs import runs_in
from shardwise.web.openapi import openapi
from shardwise.web.site import HUB, page_files
from shardwise.web.work import Reply
from shardwise.web.workers import Workers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = "127.0.0.1"
# Most bytes of a request: enough for a pasted config.json.
MOST_BYTES = 2 * 2**20
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
}
# Headers of every response: no guessed content types, no frames, no caching.
_SAFE = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class LoopbackOnly:
    """Middleware that refuses requests from other hosts or origins with status 403.

    So no other web page can use this server.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts
        self.origins = {f"http://{host}" for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            origin = headers.get(b"origin")
            foreign = origin is not None and origin not in self.origins
            if foreign or headers.get(b"host") not in self.hosts:
                refusal = _refusal(403, "This server answers only its own page.")
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)


def make_app(
    port: int, token: str, runs: Path | None, workers: Workers, hub: str = HUB
) -> Starlette:
    """The web application: the page, its API, and reports about runs in the folder `runs`.

    It reads no files but the page's own and `runs`. API requests need the `token`. `workers` do the
    work. None for `runs` serves no runs. On `hub` the page looks up models; the server never does.
    """
    files = page_files("server", hub=hub)

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404, "There is no such file.")
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=_SAFE)

    async def ask(request: Request) -> Response:
        _check(request, token)
        body = await _body(request)
        # Text that is not Unicode is no JSON either.
        task = {"question": body.decode("utf-8", "replace")}
        found = await _reply_unless_disconnected(request, workers, task)
        if found.status not in (200, 422):
            raise HTTPException(found.status, found.text)
        return Response(found.text, found.status, media_type="application/json", headers=_SAFE)

    async def list_runs(request: Request) -> Response:
        _check(request, token)
        try:
            found = runs_in(runs)
        except OSError as error:
            raise HTTPException(404, f"{runs}: {error.strerror}") from None
        return JSONResponse({"runs": found}, headers=_SAFE)

    async def show_run(request: Request) -> Response:
        # A link cannot send a header.
        _check(request, token, request.query_params.get("token", ""))
        if runs is None:
            raise HTTPException(404, "There is no such run.")
        task = {"folder": str(runs), "run": request.path_params["name"]}
        found = await _reply_unless_disconnected(request, workers, task)
        if found.status != 200:
            raise HTTPException(found.status, found.text)
        return Response(found.text, media_type="text/html", headers=_SAFE)

    async def described(_: Request) -> Response:
        return JSONResponse(openapi(f"http://{LOOPBACK}:{port}"), headers=_SAFE)

    hosts = frozenset(f"{name}:{port}" for name in (LOOPBACK, "localhost"))
    return Starlette(
        routes=[
            Route("/", page),
            Route("/openapi.json", described),
            Route("/api/answer", ask, methods=["POST"]),
            Route("/api/runs", list_runs),
            Route("/runs/{name}", show_run),
            Route("/{name}", page),
        ],
        middleware=[Middleware(LoopbackOnly, hosts=hosts)],
        exception_handlers={
            HTTPException: _refused,
            ClientDisconnect: _client_closed,
            Exception: _failed,
        },
    )


def _check(request: Request, token: str, given: str = "") -> None:
    """Raise HTTPException 401 unless the request has the token, in its header or as `given`."""
    given = given or request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise HTTPException(401, "Open the address that 'shardwise serve' printed.")


async def _body(request: Request) -> bytes:
    """The body of a JSON request; HTTPException if it is not JSON or longer than `MOST_BYTES`."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "Send JSON, with Content-Type: application/json.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"A question has at most {MOST_BYTES:,} bytes.")
    return bytes(body)


async def _reply_unless_disconnected(
    request: Request, workers: Workers, task: dict[str, Any]
) -> Reply:
    """The reply of a worker to a task; ClientDisconnect if the client leaves first.

    The task is cancelled when the client closes its connection.
    """
    working = asyncio.ensure_future(workers.reply(task))
    leaving = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for one in (working, leaving):
            one.cancel()
            with suppress(asyncio.CancelledError, ClientDisconnect):
                await one


async def _wait_for_disconnect(request: Request) -> None:
    """Return once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _client_closed(_: Request, __: Exception) -> Response:
    """Status 499, for a client that has closed its connection."""
    return Response(status_code=499)


async def _failed(_: Request, error: Exception) -> Response:
    """Status 500 with the type of an unexpected error."""
    return _refusal(500, f"The server failed on this request: {type(error).__name__}.")


async def _refused(_: Request, error: Exception) -> Response:
    """The status and sentence of an HTTPException as JSON."""
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, error.detail, error.headers)


def _refusal(status: int, sentence: str, headers: object = None) -> JSONResponse:
    """A JSON response with one problem and the safety headers."""
    more = dict(headers) if isinstance(headers, dict) else {}
    return JSONResponse({"problems": [sentence]}, status, headers={**_SAFE, **more})
