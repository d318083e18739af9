"""HTML and SVG in which text cannot become markup: whatever is not markup already is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is markup already. Only this module and literals of this package make it."""

    __slots__ = ()


Content = str | Markup | None | Iterable["Content"]


def element(tag: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """`<tag attribute="…">content</tag>`.

    Of attributes, `class_` is `class` and `aria_label` is `aria-label`; None and False leave one
    out, True writes its bare name.
    """
    written = []
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-")
        if value is None or value is False:
            continue
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        written.append(f" {key}" if value is True else f' {key}="{escape(shown)}"')
    return Markup(f"<{tag}{''.join(written)}>{_inside(content)}</{tag}>")


def fragment(*content: Content) -> Markup:
    """Pieces one after the other."""
    return Markup(_inside(content))


def _inside(content: Iterable[Content]) -> str:
    parts = []
    for part in content:
        if part is None:
            continue
        if isinstance(part, Markup):
            parts.append(str.__str__(part))
        elif isinstance(part, str):
            parts.append(escape(part))
        else:
            parts.append(_inside(part))
    return "".join(parts)


def table(head: Iterable[Content], rows: Iterable[Iterable[Content]]) -> Markup:
    """A table that scrolls by itself where it is too wide; the first column names its rows."""
    columns = [element("th", cell, scope="col") for cell in head]
    body = []
    for row in rows:
        name, *cells = row
        body.append(
            element("tr", element("th", name, scope="row"), [element("td", cell) for cell in cells])
        )
    drawn = element(
        "table",
        element("thead", element("tr", columns)),
        element("tbody", body),
        class_="numbers",
    )
    # Reachable by keyboard: what scrolls must be.
    return element("div", drawn, class_="scroll", tabindex="0", role="region", aria_label="table")
