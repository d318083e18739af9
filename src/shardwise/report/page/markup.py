"""HTML and SVG built from elements; text that is not markup is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

from shardwise.spec.foreign_text import visible

__all__ = ["Content", "Markup", "element", "fragment", "table"]

# Between a number and its unit, where no line may break.
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[A-Za-z])")
Content = str | Markup | None | Iterable["Content"]


def element(tag: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """Return `<tag attribute="…">content</tag>`.

    In attribute names, `class_` is `class` and `aria_label` is `aria-label`. None and False leave
    an attribute out; True writes its bare name.
    """
    written = []
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-")
        if value is None or value is False:
            continue
        shown = f"{value:.6g}" if isinstance(value, float) else value
        written.append(f" {key}" if value is True else f' {key}="{_escaped(str(shown))}"')
    return Markup(f"<{tag}{''.join(written)}>{fragment(*content)}</{tag}>")


def fragment(*content: Content) -> Markup:
    """Join pieces in order; plain text is escaped and None is left out."""
    return Markup().join(_pieces(content))


def _pieces(content: Iterable[Content]) -> Iterable[Markup]:
    """Nested content as a flat sequence of escaped markup."""
    for piece in content:
        if isinstance(piece, str):
            yield _escaped(piece)
        elif piece is not None:
            yield from _pieces(piece)


def _escaped(text: str) -> Markup:
    """The text with control characters replaced and HTML escaped; markup stays as it is."""
    return text if isinstance(text, Markup) else escape(visible(text))


def table(
    head: Iterable[Content], rows: Iterable[Iterable[Content]], name: str = "table"
) -> Markup:
    """An HTML table that scrolls in its own box if it is too wide; rows start with their name.

    `name` identifies the table for screen readers.
    """
    columns = [element("th", cell, scope="col") for cell in head]
    body = []
    for first, *cells in rows:
        values = [element("td", _unbroken(cell)) for cell in cells]
        body.append(element("tr", element("th", first, scope="row"), values))
    drawn = element(
        "table",
        element("thead", element("tr", columns)),
        element("tbody", body),
        class_="numbers",
    )
    # A box that scrolls must be reachable by keyboard.
    return element("div", drawn, class_="scroll", tabindex="0", role="region", aria_label=name)


def _unbroken(cell: Content) -> Content:
    """Text with non-breaking spaces between numbers and units."""
    return _BEFORE_UNIT.sub("\u00a0", cell) if type(cell) is str else cell
