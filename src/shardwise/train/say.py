"""Messages and log lines of launchers and ranks to whoever watches a run."""

from __future__ import annotations

import contextlib
import logging

from shardwise.spec.foreign_text import echo, one_line


def say(message: str) -> None:
    # The output may be a file on a full disk.
    with contextlib.suppress(OSError):
        echo(f"shardwise: {one_line(message)}", err=True)


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            echo(one_line(self.format(record)), err=True)


_PRINTER = _Printer(logging.WARNING)


def show_log_lines() -> None:
    """Print the log lines of Shardwise as every other message."""
    logging.getLogger("shardwise").addHandler(_PRINTER)
