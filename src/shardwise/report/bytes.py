"""A bar of bytes, for commands that read or write many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bytes_bar(total: int | None = None, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """On a terminal, while it lasts; yields what is told of every few bytes more."""
    out = Console(stderr=True)
    known = (BarColumn(), TimeRemainingColumn(compact=True)) if total else (SpinnerColumn(),)
    columns = (*known, DownloadColumn(), TransferSpeedColumn())
    hidden = quiet or not out.is_terminal
    with Progress(*columns, console=out, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
