"""Messages of launchers and ranks to whoever watches a run."""

from __future__ import annotations

import contextlib
import sys


def say(message: str) -> None:
    # The output may be a file on a full disk.
    with contextlib.suppress(OSError):
        print(f"shardwise: {message}", file=sys.stderr, flush=True)  # noqa: T201
