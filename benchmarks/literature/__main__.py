"""Experiments of the literature, predicted again: what was published, what we say, and why.

    python -m benchmarks.literature [--json] [--write]

Rows are in figures.csv. `--write` updates docs/literature.md, which is what this prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.literature.rows import Row, Source, read_rows, read_sources

PAGE = Path(__file__).resolve().parents[2] / "docs" / "literature.md"
BASES = {
    "measured": "measured runs",
    "derived": "derived in a paper (arithmetic)",
    "estimated": "expected by a source, not measured",
}


def study() -> dict[str, Any]:
    rows = read_rows()
    return {
        "all": summary(rows),
        "by_basis": {basis: summary(one for one in rows if one.basis == basis) for basis in BASES},
        "rows": [row._asdict() | {"error": row.error} for row in rows],
    }


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    rows = list(rows)
    predicted = [row for row in rows if row.predicted is not None]
    errors = [abs(row.error) for row in predicted if row.error is not None]
    return {
        "figures": len(rows),
        "predicted": len(predicted),
        "within_15_percent": sum(row.near for row in predicted),
        "median_error": statistics.median(errors),
    }


# ---- page -----------------------------------------------------------------------------------


def report(rows: list[Row], sources: list[Source]) -> str:
    """The text of docs/literature.md."""
    lines = [*_head(rows), *_conclusions(rows)]
    for source in sources:
        lines += _section(source, [row for row in rows if row.source == source.key])
    return "\n".join(lines)


def _head(rows: list[Row]) -> list[str]:
    def line(name: str, r: dict[str, Any]) -> str:
        return (
            f"| {name} | {r['figures']} | {r['predicted']} | {r['within_15_percent']} "
            f"| {r['median_error']:.1%} |"
        )

    return [
        "# The literature, replayed",
        "",
        "The papers that sharded training stands on, and a report that many read first: their "
        "published figures beside what Shardwise predicts for the same run. Nothing was fitted to "
        "them. `python -m benchmarks.literature` prints this page; `--json` has the rows.",
        "",
        "| figures | published | predicted | within 15 % | median error |",
        "|---|---|---|---|---|",
        line("**all**", summary(rows)),
        *(line(name, summary(r for r in rows if r.basis == key)) for key, name in BASES.items()),
        "",
        "Where an error is larger, the last column of the tables gives the reason: what the source "
        "does not state, what it counts differently, or what is not modelled. No prediction was "
        "changed after the look. But reasons were found after it, and settings that a source "
        "leaves open were chosen with its figures in sight; each section says which.",
        "",
    ]


def _conclusions(rows: list[Row]) -> list[str]:
    worst = [
        row for row in rows
        if row.basis == "measured" and row.predicted is not None and not row.near
    ]  # fmt: skip
    return [
        f"Of the measured figures, {len(worst)} are further off:",
        "",
        "- rates and memory where the report contradicts itself",
        "- fp32, whose kernels are priced as those of bf16",
        "- kernels of collectives, whose time includes waiting for another rank",
        "- one sequence at a time, where the host is the limit, which is not predicted",
        "- ZeRO-3 in a stack of 2021",
        "- models at the limit of 32 GB",
        "- the gain from a doubled network, whose batch is not stated",
        "",
    ]


def _section(source: Source, rows: list[Row]) -> list[str]:
    predicted = [row for row in rows if row.predicted is not None]
    missing = [row for row in rows if row.predicted is None]
    lines = [
        f"## {source.title.partition(':')[0]}",
        "",
        f"[{source.title}]({source.url}). Read: {source.read}. {source.note}",
        "",
        "| figure | where | unit | published | predicted | error | why | prediction |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in predicted),
        "",
    ]
    if missing:
        lines += [
            "Not predicted:",
            "",
            "| figure | where | unit | published | why |",
            "|---|---|---|---|---|",
            *(
                f"| {row.what} | {row.where} | {row.unit} | {_shown(row.published)} | {row.why} |"
                for row in missing
            ),
            "",
        ]
    return lines


def _line(row: Row) -> str:
    assert row.predicted is not None
    error = f"{row.error:+z.1%}" if row.error is not None else ("" if row.near else "differs")
    how = row.how.replace(" | ", " and ")
    return (
        f"| {row.what} | {row.where} | {row.unit} | {_shown(row.published)} "
        f"| {_shown(row.predicted)} | {error} | {'' if row.near else row.why} | `{how}` |"
    )


def _shown(value: float | str) -> str:
    """Four significant digits, without an exponent."""
    if isinstance(value, str):
        return value
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="update docs/literature.md")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(study(), indent=2))
        return
    text = report(read_rows(), read_sources())
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
