"""Parts of every screen: a console of 80 columns, borderless tables, bullets, bars, errors."""

from __future__ import annotations

from textwrap import fill

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.report.words import error_words

WIDTH = 80
BAR = 20
COLOURS = {"good": "green", "fair": "yellow", "bad": "red"}


def plain_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal; markup is off because names come from files."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def screen(console: Console | None = None) -> Console:
    """A console of at most 80 columns; `console` itself where one is given."""
    out = console or plain_console()
    out.width = min(WIDTH, out.width)
    return out


def plain_table(gap: int = 2) -> Table:
    """A table without borders: `gap` spaces between columns, bold titles."""
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")


def bullet(out: Console, sentence: str) -> None:
    """Print a sentence as an item of a list, wrapped between words."""
    _wrapped(out, sentence, "- ", "  ")


def option(out: Console, line: str) -> None:
    """Print one of several options: indented, and what is wrapped further."""
    _wrapped(out, line, "  ", "    ")


def _wrapped(out: Console, text: str, first: str, others: str) -> None:
    lines = fill(
        text, out.width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )
    out.print(lines, soft_wrap=True)


def bar(share: float) -> Text:
    """A share as a bar of 20 characters; red above 100 %."""
    filled = min(BAR, round(share * BAR))
    colour = "red" if share > 1 else "cyan"
    return Text("█" * filled, style=colour) + Text("·" * (BAR - filled), style="dim")


def show_error(error: float | None) -> Text:
    """A relative prediction error, coloured by its size; empty where it is not known."""
    if error is None:
        return Text("")
    words, tone = error_words(error)
    return Text(words, style=COLOURS[tone])
