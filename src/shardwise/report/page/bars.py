"""Stacked bars in plain HTML: they fit any width, print, and need no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shardwise.report.page.markup import Content, Markup, element, fragment, table

# More bars than this are folded into a <details>.
_MANY = 24


class Bar(NamedTuple):
    """One bar: its name, whether it is predicted or measured, and its parts in order."""

    name: str
    kind: str
    parts: Mapping[str, float]
    # Text after the total, such as a spread.
    remark: str = ""


class Limit(NamedTuple):
    """A marked value on the scale of all bars."""

    name: str
    value: float


def badge(kind: str) -> Markup:
    """An HTML label that says predicted, simulated or measured."""
    return element("span", kind, class_=f"kind {kind}")


def bars(
    rows: Sequence[Bar],
    names: Mapping[str, str],
    show: Callable[[float], str],
    *,
    limit: Limit | None = None,
    what: str,
) -> Markup:
    """Stacked bars on one scale as HTML, with a legend and a table.

    `names` maps parts to their labels, `show` writes values, and `what` names the figure.
    """
    totals = [sum(bar.parts.values()) for bar in rows]
    scale = max([*totals, *([limit.value] if limit else [])]) or 1.0
    drawn = [_bar(bar, total, scale, names, show) for bar, total in zip(rows, totals, strict=True)]
    there = [part for part in names if any(bar.parts.get(part) for bar in rows)]
    legend = element(
        "ul",
        [element("li", element("i", class_=f"p-{part}"), names[part]) for part in there],
        class_="legend",
        aria_hidden="true",
    )
    line = None
    if limit is not None:
        line = element(
            "div",
            element("span", f"{limit.name} {show(limit.value)}"),
            class_="limit",
            style=f"--at:{limit.value / scale:.5f}",
        )
    drawing: Content = element(
        "div", line, drawn, class_="bars", role="img", aria_label=_alt(rows, what, show)
    )
    if len(rows) > _MANY:
        drawing = element("details", element("summary", f"All {len(rows)} bars"), drawing)
    return fragment(
        drawing,
        legend,
        _numbers(rows, there, names, show, what),
    )


def _bar(
    bar: Bar, total: float, scale: float, names: Mapping[str, str], show: Callable[[float], str]
) -> Markup:
    """One bar as HTML: its name, its parts, and its total."""
    segments = [
        element(
            "i",
            class_=f"p-{part}",
            style=f"width:{100 * bar.parts[part] / scale:.3f}%",
            title=f"{names[part]}: {show(bar.parts[part])}, {bar.kind}",
        )
        for part in names
        if bar.parts.get(part)
    ]
    told = [element("b", show(total)), f" {bar.remark}" if bar.remark else None]
    return element(
        "div",
        element("div", element("span", bar.name, class_="of"), badge(bar.kind), class_="who"),
        element("div", segments, class_="track"),
        element("div", told, class_="sum"),
        class_="bar",
    )


def _alt(rows: Sequence[Bar], what: str, show: Callable[[float], str]) -> str:
    """A description of the bars for screen readers."""
    told = [f"{bar.name}, {bar.kind}: {show(sum(bar.parts.values()))}" for bar in rows]
    return f"{what}. " + "; ".join(told) + ". The table below has the numbers."


def _numbers(
    rows: Sequence[Bar],
    parts: Sequence[str],
    names: Mapping[str, str],
    show: Callable[[float], str],
    what: str,
) -> Markup:
    """A folded table with the value of each part in each bar."""
    head = ["part", *(fragment(f"{bar.name} ", badge(bar.kind)) for bar in rows)]
    body = [
        [names[part], *(show(bar.parts[part]) if part in bar.parts else "" for bar in rows)]
        for part in parts
    ]
    body.append(["total", *(show(sum(bar.parts.values())) for bar in rows)])
    return element("details", element("summary", "Table"), table(head, body, what))
