"""Stacked bars of plain HTML: they bend to any width, print, and need no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shardwise.report.page.markup import Content, Markup, element, fragment, table

# More bars than this are folded away.
_MANY = 24


class Bar(NamedTuple):
    """One bar: what it is of, how it came to be known, and its parts in their order."""

    name: str
    kind: str
    parts: Mapping[str, float]
    # Behind the bar, such as a spread.
    remark: str = ""


class Limit(NamedTuple):
    """A line across all bars."""

    name: str
    value: float


def badge(kind: str) -> Markup:
    """How a number came to be known, in a word."""
    return element("span", kind, class_=f"kind {kind}")


def bars(
    rows: Sequence[Bar],
    names: Mapping[str, str],
    show: Callable[[float], str],
    *,
    limit: Limit | None = None,
    what: str,
) -> Markup:
    """Bars on one scale, a legend, and the same numbers as a table. `names` are those of parts."""
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
        _numbers(rows, there, names, show),
    )


def _bar(
    bar: Bar, total: float, scale: float, names: Mapping[str, str], show: Callable[[float], str]
) -> Markup:
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
    told = [f"{bar.name}, {bar.kind}: {show(sum(bar.parts.values()))}" for bar in rows]
    return f"{what}. " + "; ".join(told) + ". The numbers are in the table below."


def _numbers(
    rows: Sequence[Bar],
    parts: Sequence[str],
    names: Mapping[str, str],
    show: Callable[[float], str],
) -> Markup:
    head = ["", *(fragment(f"{bar.name} ", badge(bar.kind)) for bar in rows)]
    body = [
        [names[part], *(show(bar.parts[part]) if part in bar.parts else "" for bar in rows)]
        for part in parts
    ]
    body.append(["together", *(show(sum(bar.parts.values())) for bar in rows)])
    return element("details", element("summary", "As numbers"), table(head, body))
