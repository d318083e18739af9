"""`python -m benchmarks.measured check|report|refit`: contributed runs.

`check` validates every file and the protocol; it exits with 1 if one is refused. `report` shows
errors by device, release and feature; with `--write` it updates accuracy.toml of the catalogue.
`refit` fits the sources that the protocol releases and shows errors before and after; with
`--write` it updates coefficients.toml of the catalogue.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measured import evidence
from benchmarks.measured.errors import lines
from benchmarks.measured.files import RUNS, Checked, check
from benchmarks.measured.protocol import Protocol, published_violations, read_protocol, violations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured", description=__doc__)
    parser.add_argument("command", choices=["check", "report", "refit"])
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of sources")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="update the catalogue")
    asked = parser.parse_args()
    if not asked.runs.is_dir():
        parser.error(f"--runs: {asked.runs} is not a folder; give the folder of sources")
    protocol = read_protocol()
    checked = check(asked.runs)
    problems = [*checked.problems, *violations(protocol, checked.entries)]
    problems += published_violations(protocol)
    for problem in problems:
        print(f"refused: {problem}", file=sys.stderr)
    if asked.write and problems:
        print("nothing is written while files are refused", file=sys.stderr)
        return 1
    {"check": _check, "report": _report, "refit": _refit}[asked.command](checked, protocol, asked)
    return 1 if problems else 0


def _check(checked: Checked, protocol: Protocol, asked: argparse.Namespace) -> None:
    sources = sorted({entry.source for entry in checked.entries})
    if asked.json:
        print(json.dumps({"valid": len(checked.entries), "problems": checked.problems}))
        return
    for source in sources:
        count = sum(entry.source == source for entry in checked.entries)
        print(f"{source}: {count} valid, {protocol.split(source)}")
    print(f"{len(checked.entries)} valid files of {len(sources)} sources")


def _report(checked: Checked, protocol: Protocol, asked: argparse.Namespace) -> None:
    found = lines(checked.entries)
    if asked.write:
        evidence.write(evidence.evidence(checked.entries, protocol))
    if asked.json:
        print(json.dumps([line._asdict() for line in found]))
        return
    print("| by | name | runs | sources | tokens/s: median | 90th | memory: median | 90th |")
    print("|---|---|---|---|---|---|---|---|")
    for line in found:
        parts = " | ".join(f"{_share(one)}" for one in (line.time, line.memory))
        print(f"| {line.by} | {line.name} | {line.runs} | {line.sources} | {parts} |")


def _share(found: dict[str, float] | None) -> str:
    if found is None:
        return " | "
    return f"{found['median_error']:.1%} | {found['p90_error']:.1%}"


def _refit(checked: Checked, protocol: Protocol, asked: argparse.Namespace) -> None:
    from benchmarks.measured import refit

    found = refit.refit(checked.entries, protocol)
    if asked.write:
        refit.write(found)
    if asked.json:
        print(json.dumps([_plain(one) for one in found]))
        return
    if not found:
        print("No source is released for fitting: all are held out (protocol.toml).")
    for one in found:
        print(f"{one.device}, fitted on {', '.join(one.sources)}")
        for name, judged in (("fitted", one.fitted), ("held out", one.held_out)):
            if judged is not None:
                before, after = (each["median_error"] for each in judged)
                print(f"  {name}: {judged[0]['rows']} runs, median error of tokens/s "
                      f"{before:.1%} with the catalogue, {after:.1%} refitted")  # fmt: skip


def _plain(one: Any) -> dict[str, Any]:
    return {
        "device": one.device,
        "sources": one.sources,
        "fitted": one.fitted,
        "held_out": one.held_out,
        "coefficients": one.fit.calibration.coefficients(),
    }


if __name__ == "__main__":
    sys.exit(main())
