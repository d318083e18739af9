"""Line and scatter charts, as part of a page or as a separate SVG file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.report.page.markup import Content, Markup, element, fragment

COLOURS = 8
# Most labelled marks on an axis; more would overlap.
_MOST_MARKS = 10


class Frame(NamedTuple):
    """Size of a drawing and the margins around its plot, in pixels."""

    width: int = 640
    height: int = 340
    left: int = 84
    right: int = 40
    top: int = 16
    bottom: int = 58


# A file has room for its title above the plot and for its legend on the right.
_FILE = Frame(height=360, left=64, right=150, top=40, bottom=48)
# Colours of a file read on light and dark paper: an image cannot know the theme around it.
_FILE_STYLE = """
svg { font: 12px system-ui, sans-serif; fill: #808080; color: #808080; }
.heading { font-size: 14px; font-weight: 600; }
.grid line { stroke: #80808040; }
.area { fill-opacity: .35; }
polyline { fill: none; stroke: currentColor; stroke-width: 2; }
circle { fill: currentColor; fill-opacity: .75; }
.predicted circle { display: none; }
rect { fill: currentColor; }
.s0 { color: #3b82f6; } .s1 { color: #f59e0b; } .s2 { color: #ef4444; } .s3 { color: #10b981; }
.s4 { color: #8b5cf6; } .s5 { color: #6b7280; } .s6 { color: #a63a79; } .s7 { color: #197b8c; }
"""


class Series(NamedTuple):
    """Points (x, y) under a name; without a name, the legend leaves the series out."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "predicted"
    colour: int = 0
    # Whether a line joins the points.
    line: bool = True
    # Tooltips of the points.
    titles: Sequence[str] = ()
    # Drawn larger than the others.
    strong: bool = False


class Area(NamedTuple):
    """A shaded polygon under a name."""

    name: str
    corners: Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """Title of an axis, and how its values are shown."""

    title: str
    show: Callable[[float], str]
    logarithmic: bool = False
    # Labelled values; empty to choose round ones.
    marks: Sequence[float] = ()
    from_zero: bool = False

    @classmethod
    def labelled(
        cls, title: str, marks: Sequence[tuple[float, str]], logarithmic: bool = False
    ) -> Axis:
        """An axis with these marks and their labels."""
        labels = dict(marks)
        return cls(title, lambda value: labels.get(value, f"{value:g}"), logarithmic, list(labels))


def chart(x: Axis, y: Axis, series: Sequence[Series], alt: str) -> Markup:
    """A chart as an HTML figure with a legend; empty without points.

    `alt` describes it in words.
    """
    series = [one for one in series if one.points]
    if not series:
        return fragment()
    frame = Frame()
    drawing = element(
        "svg",
        element("title", alt),
        _plot(x, y, series, (), frame),
        viewBox=f"0 0 {frame.width} {frame.height}",
        role="img",
        class_="chart",
    )
    return element("figure", element("figcaption", element("b", y.title), _legend(series)), drawing)


def svg_file(
    title: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    alt: str,
    *,
    areas: Sequence[Area] = (),
    square: bool = False,
) -> str:
    """A chart as the text of an SVG file, with title and legend.

    `alt` describes it in words. `square` makes the plot as high as wide.
    """
    side = _FILE.width - _FILE.left - _FILE.right
    frame = _FILE._replace(height=side + _FILE.top + _FILE.bottom) if square else _FILE
    drawing = element(
        "svg",
        element("title", alt),
        element("style", Markup(_FILE_STYLE)),
        element("text", title, x=4, y=14, class_="heading"),
        _text(2, frame.top - 8, y.title, "start"),
        _plot(x, y, series, areas, frame),
        _file_legend(series, areas, frame),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {frame.width} {frame.height}",
        role="img",
    )
    return f"{drawing}\n"


def _plot(
    x: Axis, y: Axis, series: Sequence[Series], areas: Sequence[Area], frame: Frame
) -> Markup:
    """Grid, marks, the title of the x axis, areas and series."""
    left, right = frame.left, frame.width - frame.right
    top, bottom = frame.top, frame.height - frame.bottom
    across = _Scale(x, [p[0] for one in series for p in one.points], left, right)
    up = _Scale(y, [p[1] for one in series for p in one.points], bottom, top)
    grid = []
    for mark in across.marks:
        at = across(mark)
        grid += [_line(at, top, at, bottom), _text(at, bottom + 22, x.show(mark), "middle")]
    for mark in up.marks:
        at = up(mark)
        grid += [_line(left, at, right, at), _text(left - 8, at + 4, y.show(mark), "end")]
    shaded = [
        element("polygon", points=_path([(across(a), up(b)) for a, b in area.corners]),
                class_="area")
        for area in areas
    ]  # fmt: skip
    return fragment(
        element("g", grid, class_="grid"),
        _text((left + right) / 2, frame.height - 6, x.title, "middle"),
        shaded,
        [_series(one, x, y, across, up) for one in series],
    )


class _Scale:
    """Maps values of an axis to pixels; called with a value, it returns its pixel."""

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
        # Points at the edge are not cut off.
        margin = 10 if axis.marks else 0
        self._begin = begin + math.copysign(margin, end - begin)
        self._end = end - math.copysign(margin, end - begin)

    def __call__(self, value: float) -> float:
        share = (self._turn(value) - self._low) / ((self._high - self._low) or 1)
        return self._begin + share * (self._end - self._begin)


def _round_marks(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2, 2.5 or 5 times a power of ten that span low to high."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers that span low to high: of 2 up to a ratio of 128, of 10 beyond."""
    base = 2.0 if high / low <= 2**7 else 10.0
    first, last = (
        math.floor(math.log(low, base) + 1e-9),
        math.ceil(math.log(high, base) - 1e-9),
    )
    return [base**n for n in range(first, max(last, first + 1) + 1)]


def _series(
    one: Series, x: Axis, y: Axis, across: Callable[[float], float], up: Callable[[float], float]
) -> Markup:
    """A series as SVG: a line if it has one, and a dot with a tooltip per point."""
    places = [(across(a), up(b)) for a, b in one.points]
    colour = f"s{one.colour % COLOURS} {one.kind}"
    drawn = []
    if one.line and len(places) > 1:
        drawn.append(element("polyline", points=_path(places)))
    for number, (a, b) in enumerate(places):
        title = one.titles[number] if one.titles else ""
        told = title or f"{one.name}: {y.show(one.points[number][1])}"
        told = f"{told}, {one.kind} ({x.title} {x.show(one.points[number][0])})"
        radius = 7.0 if one.strong else 4.0
        drawn.append(element("circle", element("title", told), cx=a, cy=b, r=radius))
    return element("g", drawn, class_=colour)


def _legend(series: Sequence[Series]) -> Markup:
    """The legend of a page's chart: one item per name, with its kinds."""
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


def _file_legend(series: Sequence[Series], areas: Sequence[Area], frame: Frame) -> Markup:
    """The legend of an SVG file: names on the right, then what dots and lines mean."""
    named = {one.name: f"s{one.colour % COLOURS}" for one in series if one.name}
    left = frame.width - frame.right + 16
    rows: list[tuple[Content, str]] = [
        (element("rect", x=left, y=-9, width=10, height=10, class_=colour), name)
        for name, colour in named.items()
    ]
    rows += [
        (element("rect", x=left, y=-9, width=10, height=10, fill_opacity=0.35), area.name)
        for area in areas
    ]
    if {one.kind for one in series if one.name} == {"predicted", "measured"}:
        dash = element("polyline", points=f"{left},-4 {left + 10},-4")
        rows += [(element("circle", cx=left + 5, cy=-4, r=4), "measured"), (dash, "predicted")]
    return fragment(
        element("g", drawn, _text(left + 16, 0, name, "start"),
                transform=f"translate(0 {frame.top + 10 + 20 * number})")
        for number, (drawn, name) in enumerate(rows)
    )  # fmt: skip


def _path(places: Sequence[tuple[float, float]]) -> str:
    """Points as the value of an SVG `points` attribute."""
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in places)


def _line(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor)
