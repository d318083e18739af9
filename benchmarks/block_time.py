"""Where the time goes in a block: a picture per device, with measured kernels as points.

    python -m benchmarks.block_time [--points]

Writes docs/concepts/block-*.svg and the table of docs/concepts/block-time.md. `--points` first
chooses the points anew from the published tables, which lie beside the project.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.validation import FOLDER
from shardwise.predict.compute import Parts, forward_parts
from shardwise.predict.kernels import catalogue_coefficients, hardware_of, measured_attention
from shardwise.report.page.chart import Axis, Series, svg_file
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.kernels import AttentionKernel
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.software import find_software
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units
from shardwise.units.stage import Stage

DOCS = Path(__file__).resolve().parents[1] / "docs" / "concepts"
POINTS = FOLDER / "kernel_points.csv"
PAGE = DOCS / "block-time.md"
START, END = "<!-- table: written by python -m benchmarks.block_time -->\n", "<!-- end -->"
MODEL, TOKENS = "llama-3-8b", 2**17
DEVICES = ("A100-80GB", "H100-SXM", "B200", "L40S")
SPANS = [2**power for power in range(10, 18)]
# Points of a kernel that are drawn: the median of each length and source.
MOST = 40


class Point(NamedTuple):
    """A measured kernel: keys a query sees, or rows of a product, and the share of the peak."""

    device: str
    family: str
    kernel: str
    size: int
    share: float
    source: str


# ---- what is predicted ------------------------------------------------------------------------


def _cluster(device: str) -> ClusterSpec:
    return find_cluster(f"1x{device}")


def _block(span: int) -> Stage:
    strategy = Strategy.read({"kind": "single"})
    return load_units(find_model(MODEL), span, strategy).blocks[0].stage


def parts(device: str, span: int) -> Parts:
    """Of a forward of one block over as many tokens as the longest sequence has."""
    cluster = _cluster(device)
    hardware = hardware_of(cluster, "bf16")
    assert hardware is not None
    k = catalogue_coefficients(cluster)._replace(level=1.0)
    found = forward_parts(_block(span), np.asarray([float(TOKENS)]), hardware, k)
    return Parts(*(float(np.squeeze(part)) for part in found))  # type: ignore[arg-type]


# ---- points -----------------------------------------------------------------------------------


def choose() -> list[Point]:
    """Medians of the published kernels by device, kernel, size and source."""
    return sorted(
        {
            point
            for device in DEVICES
            for point in (*_attention_points(device), *_product_points(device))
        }
    )


def _attention_points(device: str) -> Iterator[Point]:
    from benchmarks.kernels.attention import PASSES, _grouped

    software = find_software()
    wanted = measured_attention(_cluster(device).device, software).kernel
    assert isinstance(wanted, AttentionKernel)
    for key, rows in _grouped().items():
        if (key.device, key.kernel, key.dtype) != (wanted.device, wanted.kernel, "bf16"):
            continue
        chosen: dict[tuple[int, str], list[float]] = {}
        for row in rows:
            cells = row.cells
            other = cells["causal"] == "0" or int(row.number("head_dim")) != 128
            measured = "together" if wanted.passes == "together" else "forward"
            if other or PASSES[cells["pass"]] != measured or cells["deterministic"] == "1":
                continue
            size = int(row.number("seqlen"))
            chosen.setdefault((size, row.source), []).append(row.number("efficiency"))
        yield from _medians(wanted.device, "attention", wanted.kernel, chosen)


def _product_points(device: str) -> Iterator[Point]:
    from benchmarks.kernels.products import _matmul_key
    from benchmarks.kernels.tables import read

    chosen: dict[tuple[int, str], list[float]] = {}
    for row in read("matmul"):
        key = _matmul_key(row)
        if key is None or (key.device, key.kernel, key.dtype) != (device, "library", "bf16"):
            continue
        # As wide as the products of a block of 8B parameters.
        if (
            min(row.number("n"), row.number("k")) >= 1024
            and row.number("k") * row.number("n") >= 2**24
        ):
            chosen.setdefault((int(row.number("m")), row.source), []).append(
                row.number("efficiency")
            )
    yield from _medians(device, "products", "library", chosen)


def _medians(
    device: str, family: str, kernel: str, chosen: dict[tuple[int, str], list[float]]
) -> Iterator[Point]:
    for (size, source), shares in sorted(chosen.items())[:MOST]:
        yield Point(device, family, kernel, size, round(float(np.median(shares)), 4), source)


def read_points() -> list[Point]:
    with POINTS.open(encoding="utf-8", newline="") as file:
        return [
            Point(
                **{**row, "size": int(row["size"]), "share": float(row["share"])}  # type: ignore[arg-type]
            )
            for row in csv.DictReader(file)
        ]


def write_points(points: Sequence[Point]) -> None:
    with POINTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        writer.writerows(points)


# ---- the page ---------------------------------------------------------------------------------


def drawing(device: str, points: Sequence[Point]) -> str:
    """Milliseconds of each part against the length of sequences."""
    by_span = {span: parts(device, span) for span in SPANS}
    lines = {
        "attention": [(span, 1e3 * float(one.attention)) for span, one in by_span.items()],
        "products": [(span, 1e3 * float(one.products)) for span, one in by_span.items()],
        "element-wise": [(span, 1e3 * float(one.elementwise)) for span, one in by_span.items()],
        "host": [(span, 1e3 * float(one.host)) for span, one in by_span.items()],
    }
    wanted = measured_attention(_cluster(device).device, find_software()).kernel
    assert isinstance(wanted, AttentionKernel)
    shown = {
        "attention": [p for p in points if (p.device, p.kernel) == (wanted.device, wanted.kernel)],
        "products": [p for p in points if (p.device, p.family) == (device, "products")],
    }
    series = [
        Series(name, values, colour=number) for number, (name, values) in enumerate(lines.items())
    ]
    for number, chosen in enumerate(shown.values()):
        drawn = [p for p in chosen if SPANS[0] <= p.size <= TOKENS]
        dots = [(float(p.size), _milliseconds(device, p)) for p in drawn]
        series.append(Series("", dots, "measured", number, line=False))
    values = [value for one in series for _, value in one.points]
    return svg_file(
        f"{device}: a forward of one block of {MODEL}, {TOKENS // 1024}k tokens",
        Axis.labelled("tokens of a sequence", [(span, f"{span // 1024}k") for span in SPANS], True),
        Axis.labelled("milliseconds", _marks(values), True),
        series,
        f"On {device}, products take longest on short sequences and attention on long ones.",
    )


def _milliseconds(device: str, point: Point) -> float:
    """Of the block's work, if all of it ran at the measured share."""
    peak = _cluster(device).device.peak_flops("bf16")
    assert peak is not None
    stage = _block(min(point.size, TOKENS))
    flops = 0.5 * stage.attention_flops if point.family == "attention" else stage.matmul_flops
    return 1e3 * flops * TOKENS / (point.share * peak)


def _marks(values: Sequence[float]) -> list[tuple[float, str]]:
    low, high = min(values), max(values)
    steps = [base * 10.0**power for power in range(-3, 5) for base in (1, 3)]
    return [(one, f"{one:g}") for one in steps if low / 3.4 <= one <= high * 3.4]


def table() -> str:
    """Shares of a block's time by device and length."""
    rows = [
        "| device | sequence | block | products | attention | element-wise |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for device in DEVICES:
        for span in (4096, 32768, 131072):
            one = parts(device, span)
            of_device = [float(part) for part in (one.products, one.attention, one.elementwise)]
            whole = sum(of_device)
            shares = " | ".join(f"{part / whole:.0%}" for part in of_device)
            rows.append(f"| {device} | {span // 1024}k | {1e3 * whole:.0f} ms | {shares} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """The page with its table written anew."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


def name_of(device: str) -> str:
    return f"block-{device.lower()}.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", action="store_true", help="choose the points anew")
    if parser.parse_args().points:
        write_points(choose())
    points = read_points()
    for device in DEVICES:
        (DOCS / name_of(device)).write_text(drawing(device, points), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
