"""A progress line on stderr for work that takes longer than a second or so."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SLOW_AFTER_S = 1.5


@contextmanager
def progress_line(message: str) -> Iterator[None]:
    """Print `message` to stderr if the body takes longer than SLOW_AFTER_S; only on rank 0."""

    def show() -> None:
        print(message, file=sys.stderr, flush=True)  # noqa: T201

    if os.environ.get("RANK", "0") != "0":
        yield
        return
    timer = threading.Timer(SLOW_AFTER_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
