"""The planner behind a server on this machine: the same page with the native planner."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shardwise.spec.record import SpecError
from shardwise.web.answer import answer
from shardwise.web.local_runs import page_of, runs_in
from shardwise.web.openapi import openapi
from shardwise.web.question import read_question
from shardwise.web.site import page_files

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = "127.0.0.1"
# A pasted config.json, and some room.
MOST_BYTES = 2 * 2**20
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
}
# Text of others is never taken for something else than it is, nor kept by a browser.
_SAFE = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class OnlyFromHere:
    """Refuses requests whose host or origin is not this server: no other page can ask it."""

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


def make_app(port: int, token: str, runs: Path | None, workers: int) -> Starlette:
    """The application. It reads nothing but `runs`, a folder of runs and traces."""
    files = page_files("server")
    # Plans take seconds of Python: each has a process, so that none waits for another's.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        pool.shutdown(wait=False, cancel_futures=True)

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404, "There is no such file.")
        return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=_SAFE)

    async def ask(request: Request) -> Response:
        _check(request, token)
        body = await _body(request)
        try:
            read_question(body)
        except SpecError:
            return Response(answer(body), 422, media_type="application/json", headers=_SAFE)
        found = await asyncio.get_running_loop().run_in_executor(pool, answer, body)
        return Response(found, media_type="application/json", headers=_SAFE)

    async def list_runs(request: Request) -> Response:
        _check(request, token)
        return JSONResponse({"runs": runs_in(runs)}, headers=_SAFE)

    async def show_run(request: Request) -> Response:
        # A link cannot send a header.
        _check(request, token, request.query_params.get("token", ""))
        loop = asyncio.get_running_loop()
        try:
            text = await loop.run_in_executor(pool, page_of, runs, request.path_params["name"])
        except SpecError as error:
            raise HTTPException(422, error.problems[0]) from None
        if text is None:
            raise HTTPException(404, "There is no such run.")
        return Response(text, media_type="text/html", headers=_SAFE)

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
        middleware=[Middleware(OnlyFromHere, hosts=hosts)],
        exception_handlers={HTTPException: _refused},
        lifespan=lifespan,
    )


def _check(request: Request, token: str, given: str = "") -> None:
    given = given or request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise HTTPException(401, "Open the address that 'shardwise serve' printed.")


async def _body(request: Request) -> bytes:
    """The body of a request, of at most `MOST_BYTES`."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "Send JSON, with Content-Type: application/json.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"A question has at most {MOST_BYTES:,} bytes.")
    return bytes(body)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, error.detail, error.headers)


def _refusal(status: int, sentence: str, headers: object = None) -> JSONResponse:
    more = dict(headers) if isinstance(headers, dict) else {}
    return JSONResponse({"problems": [sentence]}, status, headers={**_SAFE, **more})
