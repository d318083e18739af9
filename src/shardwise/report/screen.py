"""What every screen shares: its width, a table without lines, a bar, and the colours of errors."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.report.words import error_words

WIDTH = 80
BAR = 20
COLOURS = {"good": "green", "fair": "yellow", "bad": "red"}


def plain_console(stderr: bool = False) -> Console:
    """As wide as the terminal; names come from files, so no markup is read from them."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def screen(console: Console | None = None) -> Console:
    """A console of at most 80 columns; made from `console` where one is given."""
    out = console or plain_console()
    out.width = min(WIDTH, out.width)
    return out


def plain_table(gap: int = 2) -> Table:
    """Columns that are apart by `gap`, under bold titles."""
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")


def bar(share: float) -> Text:
    """A share as blocks; more than all of it is red."""
    filled = min(BAR, round(share * BAR))
    colour = "red" if share > 1 else "cyan"
    return Text("█" * filled, style=colour) + Text("·" * (BAR - filled), style="dim")


def show_error(error: float | None) -> Text:
    """How far a prediction was off, coloured by how bad that is; empty where it is not known."""
    if error is None:
        return Text("")
    told, tone = error_words(error)
    return Text(told, style=COLOURS[tone])
