"""Lines and points on a plane, as SVG: lines are predicted, filled points measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.report.page.markup import Markup, element, fragment

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 84, 40, 16, 58
COLOURS = 8
# More would run into each other.
_MOST_MARKS = 9


class Series(NamedTuple):
    """Points (x, y) under a name, and what to say of each."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "predicted"
    colour: int = 0
    # Joined by a line, or dots of their own.
    line: bool = True
    titles: Sequence[str] = ()
    # Drawn larger than the others.
    strong: bool = False


class Axis(NamedTuple):
    """What is along an axis, and how its values read."""

    title: str
    show: Callable[[float], str]
    logarithmic: bool = False
    # Marks where values are few and known; chosen otherwise.
    marks: Sequence[float] = ()
    from_zero: bool = False


def chart(x: Axis, y: Axis, series: Sequence[Series], alt: str) -> Markup:
    """A figure with its legend; `alt` says in words what it shows."""
    series = [one for one in series if one.points]
    if not series:
        return fragment()
    across = _Scale(x, [p[0] for one in series for p in one.points], LEFT, WIDTH - RIGHT)
    up = _Scale(y, [p[1] for one in series for p in one.points], HEIGHT - BOTTOM, TOP)
    grid = []
    for mark in across.marks:
        at = across(mark)
        grid.append(_line(at, TOP, at, HEIGHT - BOTTOM))
        grid.append(_text(at, HEIGHT - BOTTOM + 22, x.show(mark), "middle"))
    for mark in up.marks:
        at = up(mark)
        grid.append(_line(LEFT, at, WIDTH - RIGHT, at))
        grid.append(_text(LEFT - 8, at + 4, y.show(mark), "end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawing = element(
        "svg",
        element("title", alt),
        element("g", grid, class_="grid"),
        _text(middle, HEIGHT - 6, x.title, "middle"),
        [_series(one, x, y, across, up) for one in series],
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        class_="chart",
    )
    return element("figure", element("figcaption", element("b", y.title), _legend(series)), drawing)


class _Scale:
    """From values to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: float, end: float) -> None:
        low, high = min(values), max(values)
        if axis.from_zero and not axis.logarithmic:
            low = min(0.0, low)
        if low == high:
            low, high = (low / 2, high * 2) if axis.logarithmic and low > 0 else (low, high + 1)
        self._turn: Callable[[float], float] = math.log if axis.logarithmic else float
        if 0 < len(axis.marks) <= _MOST_MARKS:
            low, high = min(low, *axis.marks), max(high, *axis.marks)
            self.marks = list(axis.marks)
        else:
            self.marks = _powers(low, high) if axis.logarithmic else _round_marks(low, high)
            low, high = min(low, *self.marks), max(high, *self.marks)
        self._low, self._high = self._turn(low), self._turn(high)
        # Points at the edge stay whole.
        margin = 10 if axis.marks else 0
        self._begin = begin + math.copysign(margin, end - begin)
        self._end = end - math.copysign(margin, end - begin)

    def __call__(self, value: float) -> float:
        share = (self._turn(value) - self._low) / ((self._high - self._low) or 1)
        return self._begin + share * (self._end - self._begin)


def _round_marks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that span the values."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of two over a few doublings, of ten over more."""
    base = 2.0 if high / low <= 2**7 else 10.0
    first, last = (
        math.floor(math.log(low, base) + 1e-9),
        math.ceil(math.log(high, base) - 1e-9),
    )
    return [base**n for n in range(first, max(last, first + 1) + 1)]


def _series(
    one: Series, x: Axis, y: Axis, across: Callable[[float], float], up: Callable[[float], float]
) -> Markup:
    places = [(across(a), up(b)) for a, b in one.points]
    colour = f"s{one.colour % COLOURS} {one.kind}"
    drawn = []
    if one.line and len(places) > 1:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        drawn.append(element("polyline", points=path))
    for number, (a, b) in enumerate(places):
        title = one.titles[number] if one.titles else ""
        told = title or f"{one.name}: {y.show(one.points[number][1])}"
        told = f"{told}, {one.kind} ({x.title} {x.show(one.points[number][0])})"
        radius = 7.0 if one.strong else 4.0
        drawn.append(element("circle", element("title", told), cx=a, cy=b, r=radius))
    return element("g", drawn, class_=colour)


def _legend(series: Sequence[Series]) -> Markup:
    kinds: dict[str, list[Series]] = {}
    for one in series:
        kinds.setdefault(one.name, []).append(one)
    items = [
        element(
            "li",
            [element("i", class_=f"s{one.colour % COLOURS} {one.kind}") for one in alike],
            f"{name} ({', '.join(dict.fromkeys(one.kind for one in alike))})",
        )
        for name, alike in kinds.items()
    ]
    return element("ul", items, class_="legend")


def _line(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor)
