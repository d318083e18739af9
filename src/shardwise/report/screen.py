"""Parts of every screen: a console of 80 columns, borderless tables, bullets, bars, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from io import StringIO
from textwrap import fill
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as TerminalTable
from rich.text import Text

from shardwise.report.table import Table
from shardwise.spec.foreign_text import visible
from shardwise.step.words import COLOURS, error_words

WIDTH = 80
BAR = 20


class _VisibleConsole(Console):
    """A console that replaces control and format characters in whatever it prints."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control or text == "\n" or text.isprintable():
                yield segment
            else:
                yield Segment(visible(text), style)


def plain_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, on stdout or stderr.

    Markup is off because names come from files.
    """
    return _VisibleConsole(stderr=stderr, highlight=False, markup=False, emoji=False)


def text_of(draw: Callable[[Console], None]) -> str:
    """The output of `draw` as text: lines of 80 columns without colours."""
    text = StringIO()
    draw(_VisibleConsole(file=text, width=WIDTH, highlight=False, markup=False, emoji=False))
    return text.getvalue()


def screen(console: Console | None = None) -> Console:
    """A console of at most 80 columns: `console` resized, or a new one on stdout."""
    out = console or plain_console()
    out.width = min(WIDTH, out.width)
    return out


def plain_table(gap: int = 2) -> TerminalTable:
    """A table without borders: `gap` spaces between columns, bold titles."""
    return TerminalTable(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")


def terminal_table(table: Table, gap: int = 2) -> TerminalTable:
    """The table for a terminal: only columns with `on_screen`."""
    shown = [index for index, column in enumerate(table.columns) if column.on_screen]
    written = plain_table(gap)
    for index in shown:
        column = table.columns[index]
        side: Literal["left", "right"] = "left" if column.left else "right"
        written.add_column(column.title, justify=side, no_wrap=not column.wrap)
    for row in table.rows:
        texts = table.texts(row)
        written.add_row(
            *(Text(texts[index], style=row.cells[index].style) for index in shown),
            style="bold" if row.strong else None,
        )
    return written


def paragraph(out: Console, sentence: str, style: str = "") -> None:
    """Print a sentence, wrapped between words."""
    _wrapped(out, sentence, "", "", style)


def heading(out: Console, title: str) -> None:
    """Print an empty line and a title."""
    out.print()
    out.print(Text(title, style="bold"))


def bullet(out: Console, sentence: str) -> None:
    """Print a sentence as an item of a list, wrapped between words."""
    _wrapped(out, sentence, "- ", "  ")


def option(out: Console, line: str) -> None:
    """Print a line indented by two spaces; wrapped lines are indented further."""
    _wrapped(out, line, "  ", "    ")


def _wrapped(out: Console, text: str, first: str, others: str, style: str = "") -> None:
    """Print a text wrapped between words; `first` and `others` are prefixes of its lines."""
    lines = fill(
        text,
        out.width,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )
    out.print(Text(lines, style=style), soft_wrap=True)


def bar(share: float) -> Text:
    """A bar of 20 characters for a share from 0 to 1; red above 1."""
    filled = min(BAR, round(share * BAR))
    colour = "red" if share > 1 else "cyan"
    return Text("█" * filled, style=colour) + Text("·" * (BAR - filled), style="dim")


def show_error(error: float | None) -> Text:
    """A relative prediction error as text, coloured by its size; empty for None."""
    if error is None:
        return Text("")
    words, tone = error_words(error)
    return Text(words, style=COLOURS[tone])
