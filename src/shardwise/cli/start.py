"""Where the `shardwise` command begins: what must be set before the first import."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys


def main() -> None:
    """Start fast, then hand over to the application."""
    # A command that answers in half a second makes no garbage worth collecting, and collecting
    # amid thousands of fresh imports takes a tenth of that time. Long commands turn it on again.
    gc.disable()
    # Looking for pydantic plugins reads the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # `shardwise catalog | head` ends like any other command whose reader goes away.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # A terminal or file that cannot show a bar gets a question mark, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        from shardwise.cli.main import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        # Taking thousands of imported objects apart again takes another tenth. Commands that start
        # processes or write while they run leave the usual way.
        if not gc.isenabled() and (end.code is None or isinstance(end.code, int)):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code or 0)
        raise
