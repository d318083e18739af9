"""Lines and points on a plane, as SVG that reads in light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 40, 48
COLOURS = ("#3b82f6", "#f59e0b", "#ef4444", "#10b981", "#8b5cf6", "#6b7280")
INK = "#808080"
SHADE = 0.35
# Of a series with more dots than this, they let others shine through.
CROWD = 50


class Series(NamedTuple):
    """Points (x, y) under a name; drawn as dots where measured, as a line where predicted."""

    name: str
    points: Sequence[tuple[float, float]]
    measured: bool
    colour: int


class Area(NamedTuple):
    """What lies between corners, shaded, under a name."""

    name: str
    corners: Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """What is along an axis, and where its marks are."""

    title: str
    marks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def scale(self, low: float, high: float) -> Callable[[float], float]:
        """From values to pixels."""
        first, last = self.marks[0][0], self.marks[-1][0]
        turn = math.log if self.logarithmic else float

        def place(value: float) -> float:
            share = (turn(value) - turn(first)) / (turn(last) - turn(first))
            return low + share * (high - low)

        return place


def chart(
    title: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    alt: str,
    *,
    areas: Sequence[Area] = (),
    height: int = HEIGHT,
) -> str:
    """A figure; `alt` says in words what it shows."""
    across = x.scale(LEFT, WIDTH - RIGHT)
    up = y.scale(height - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(alt)}</title>",
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    for value, label in x.marks:
        at = across(value)
        parts += [_line(at, TOP, at, height - BOTTOM, 0.25),
                  _text(at, height - BOTTOM + 18, label, "middle")]  # fmt: skip
    for value, label in y.marks:
        at = up(value)
        parts += [_line(LEFT, at, WIDTH - RIGHT, at, 0.25), _text(LEFT - 8, at + 4, label, "end")]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 8, x.title, "middle"))
    parts.append(_text(2, TOP - 10, y.title, "start"))
    for area in areas:
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in area.corners)
        parts.append(f'<polygon points="{path}" fill-opacity="{SHADE}"/>')
    for one in series:
        colour = COLOURS[one.colour % len(COLOURS)]
        places = [(across(a), up(b)) for a, b in one.points]
        if one.measured:
            through = ' fill-opacity="0.7"' if len(places) > CROWD else ""
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"{through}/>'
                      for a, b in places]  # fmt: skip
        else:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" '
                         'stroke-width="2"/>')  # fmt: skip
    parts += _legend(series, areas)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(series: Sequence[Series], areas: Sequence[Area]) -> list[str]:
    names = {one.name: f'fill="{COLOURS[one.colour % len(COLOURS)]}"' for one in series if one.name}
    names |= {area.name: f'fill-opacity="{SHADE}"' for area in areas}
    parts = []
    left = WIDTH - RIGHT + 16
    for number, (name, fill) in enumerate(names.items()):
        at = TOP + 10 + 20 * number
        parts += [f'<rect x="{left}" y="{at - 9}" width="10" height="10" {fill}/>',
                  _text(left + 16, at, name, "start")]  # fmt: skip
    at = TOP + 24 + 20 * len(names)
    if not all(one.name for one in series):
        return parts  # a line without a name is no prediction
    if any(one.measured for one in series):
        parts += [f'<circle cx="{left + 5}" cy="{at - 4}" r="4" fill="{INK}"/>',
                  _text(left + 16, at, "measured", "start")]  # fmt: skip
        at += 20
    if any(not one.measured for one in series):
        parts += [f'<line x1="{left}" y1="{at - 4}" x2="{left + 10}" y2="{at - 4}" '
                  f'stroke="{INK}" stroke-width="2"/>',
                  _text(left + 16, at, "predicted", "start")]  # fmt: skip
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, opacity: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" '
        f'stroke-opacity="{opacity}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
