"""A progress bar in bytes, for commands that read or write large files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from shardwise.report.screen import plain_console


@contextmanager
def bytes_bar(total: int | None = None, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yields a function to call with newly done bytes.

    `total` is the number of bytes to do; without it, the bar has no end.
    """
    out = plain_console(stderr=True)
    known = (BarColumn(), TimeRemainingColumn(compact=True)) if total else (SpinnerColumn(),)
    columns = (*known, DownloadColumn(), TransferSpeedColumn())
    hidden = quiet or not out.is_terminal
    with Progress(*columns, console=out, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
