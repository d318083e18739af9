"""Progress on stderr: a line for slow work, and the stages of a command before its first result."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardwise.spec.foreign_text import one_line

SLOW_AFTER_S = 1.5


def is_main_process() -> bool:
    """Whether this process is rank 0, or not part of a distributed run."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def progress_line(message: str) -> Iterator[None]:
    """Context that prints `message` to stderr on rank 0 if it lasts longer than SLOW_AFTER_S."""
    if not is_main_process():
        yield
        return
    timer = threading.Timer(SLOW_AFTER_S, _write, [f"{one_line(message)}\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Stages:
    """Shows the stage a command is in: a live line on a terminal, elsewhere a line per stage.

    The live line counts seconds. The cursor stays in the first column, so that output of another
    process overwrites the line.
    """

    def __init__(self) -> None:
        self._shown = False
        self._stage, self._since = "", 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self) -> None:
        """Show stages from now on, on rank 0; without this call, stages are not shown."""
        self._shown = is_main_process()

    def begin(self, stage: str) -> None:
        """Begin a stage, which ends the previous stage."""
        if not self._shown:
            return
        self._stage, self._since = one_line(stage), time.monotonic()
        if not sys.stderr.isatty():
            _write(f"{self._stage} …\n")
            return
        self._draw()
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._count, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """End the last stage: remove the live line."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            _write("\r\x1b[K")

    def _count(self) -> None:
        """Redraw the live line every second until the last stage ends."""
        while not self._ended.wait(1.0):
            self._draw()

    def _draw(self) -> None:
        seconds = f" {time.monotonic() - self._since:.0f} s"
        width = shutil.get_terminal_size().columns - 1
        _write(f"\r\x1b[K{f'{self._stage} …{seconds}'[:width]}\r")


# The stages of this process.
stages = Stages()


def _write(text: str) -> None:
    """Write text to stderr as it is, including control characters that move the cursor."""
    # The output may be a file on a full disk.
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
