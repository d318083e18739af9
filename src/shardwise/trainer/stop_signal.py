"""Signals that ask a run to stop between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], int | None]]:
    """Record SIGTERM, SIGINT and SIGUSR1 inside the context, instead of acting on them.

    The loop then stops all ranks after the same step. Yields a function that returns the first
    signal this process received; None if there was none.
    """
    received: list[int] = []
    with ExitStack() as restore:
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                before = signal.signal(name, lambda number, _: received.append(number))
                restore.callback(signal.signal, name, before)
        yield lambda: received[0] if received else None
