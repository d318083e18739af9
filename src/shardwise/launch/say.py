"""Messages and log lines of launchers and ranks to whoever watches a run."""

from __future__ import annotations

import contextlib
import logging

from shardwise.spec.foreign_text import echo, one_line


def say(message: str) -> None:
    """Print a message on one line of stderr; an error of the output is ignored."""
    # The output may be a file on a full disk.
    with contextlib.suppress(OSError):
        echo(f"shardwise: {one_line(message)}", err=True)


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            echo(one_line(self.format(record)), err=True)


_PRINTER = _Printer(logging.WARNING)


def show_log_lines() -> None:
    """Print the warnings of Shardwise's logger on stderr."""
    logging.getLogger("shardwise").addHandler(_PRINTER)
