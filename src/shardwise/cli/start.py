"""Entry point of the `shardwise` command: process settings before the first import."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys

from shardwise.launch.child import protect_children


def main() -> None:
    """Set up the process, run the application, and exit with its code."""
    # Collecting garbage during imports takes a tenth of a short command's time, and frees nothing.
    # Long commands turn the collector on again.
    gc.disable()
    protect_children()
    # Searching for pydantic plugins would read the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # `shardwise catalog | head` ends quietly, as other commands do.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # A terminal without Unicode shows question marks instead of failing.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        from shardwise.cli.main import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        # Freeing thousands of imported objects takes another tenth of the time. Long commands exit
        # the usual way, for they have processes and files to close.
        if not gc.isenabled() and (end.code is None or isinstance(end.code, int)):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code or 0)
        raise
