"""Charts as pages and files hold them: every point where its axes put it."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from shardwise.report.page.chart import Area, Axis, Series, chart, svg_file

SVG = "{http://www.w3.org/2000/svg}"
# Two decades on a logarithmic axis of 426 pixels, with a margin of 10 at each end.
X = Axis.labelled("size", [(1.0, "one"), (10.0, "ten"), (100.0, "hundred")], logarithmic=True)
Y = Axis.labelled("speed", [(0.0, "none"), (4.0, "four")])
POINTS = [(1.0, 0.0), (10.0, 2.0), (100.0, 4.0)]


def drawn(*series: Series, **more: object) -> ET.Element:
    return ET.fromstring(svg_file("<title>", X, Y, series, "a & b", **more))  # type: ignore[arg-type]


def test_points_lie_where_their_axes_put_them() -> None:
    root = drawn(Series("a", POINTS, "measured", line=False))
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    (left, low), (middle, half), (right, high) = circles
    assert middle == pytest.approx((left + right) / 2, abs=0.01)
    assert half == pytest.approx((low + high) / 2, abs=0.01)
    assert right - left == pytest.approx(640 - 64 - 150 - 20, abs=0.01)
    assert low > high  # pixels count downwards


def test_text_is_escaped_and_every_name_is_in_the_legend() -> None:
    series = [Series("<b>", POINTS, "predicted"), Series("<b>", POINTS, "measured", line=False)]
    root = drawn(*series, areas=[Area("near", POINTS)], square=True)
    text = [element.text for element in root.iter(f"{SVG}text")]
    assert {"<title>", "<b>", "near", "predicted", "measured", "one", "four"} <= set(text)
    assert root.find(f"{SVG}title").text == "a & b"  # type: ignore[union-attr]
    # A square plot: as high as it is wide.
    assert root.attrib["viewBox"] == f"0 0 640 {640 - 64 - 150 + 40 + 48}"


def test_a_page_draws_the_same_points() -> None:
    figure = ET.fromstring(chart(X, Y, [Series("a", POINTS)], "alt"))
    assert len(list(figure.iter("circle"))) == len(POINTS)
    assert not chart(X, Y, [Series("nothing", [])], "alt")
