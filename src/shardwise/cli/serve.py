"""`shardwise serve`: the planner's page on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shardwise.spec.foreign_text import echo

# Seconds that one question may take.
LIMIT_S = 60


def serve(
    runs: Annotated[
        Path | None,
        typer.Argument(help="A folder of runs and traces to show.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on the loopback.")] = 8265,
) -> None:
    """Open the planner as a page: sliders, timelines, and the runs of a folder.

    It listens on the loopback only, and answers only who has the address that it prints.
    """
    import secrets
    import signal
    import socket
    from contextlib import suppress

    from shardwise.cli.long import prepare_long_run
    from shardwise.spec.record import SpecError

    prepare_long_run()
    try:
        from shardwise.web.listen import run_server
        from shardwise.web.serve import LOOPBACK, make_app
        from shardwise.web.site import HUB
        from shardwise.web.workers import Workers
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "h11"):
            raise
        raise SpecError(
            'serve: needs starlette and uvicorn: pip install "shardwise[serve]"'
        ) from None
    if runs is not None and not runs.is_dir():
        raise SpecError(f"runs: {runs} is not a folder")
    try:
        listening = socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise SpecError(
            f"port: cannot listen on {port} ({error.strerror}); choose another with --port"
        ) from None
    # SIGTERM ends it as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    token = secrets.token_urlsafe(24)
    workers = Workers(max(1, min(4, os.cpu_count() or 1)), LIMIT_S)
    app = make_app(port, token, runs, workers, os.environ.get("HF_ENDPOINT") or HUB)
    echo(f"Planner: http://{LOOPBACK}:{port}/#token={token}")
    echo("Stop it with Ctrl-C.", err=True)
    with listening, suppress(KeyboardInterrupt):
        run_server(app, listening, workers)
