"""Break hosts of real runs and count what was survived.

`python -m benchmarks.hosts [--json] [--docs] [--faults rank-kill,shrink] [--hosts 2,3]
[--strategies zero3] [--moments 15,30] [--lanes 2]` starts runs on network namespaces, injects one
fault into each, and compares the end with a run that was left alone: every byte of the last
checkpoint where the same number of hosts trained, the losses to 1e-6 elsewhere. It needs root. A
case takes about a minute. `--docs` writes the table of docs/faults.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.hosts.cases import Case, Outcome, break_run, reference
from benchmarks.hosts.cluster import STRATEGIES
from benchmarks.hosts.faults import FAULTS
from benchmarks.hosts.table import write_table
from benchmarks.lab.network import available

# Steps after which faults happen: between two saves, and while one is written.
MOMENTS = (15, 30)


def cases(
    faults: list[str], counts: list[int], strategies: list[str], moments: list[int]
) -> list[Case]:
    """All combinations; long faults happen at the first moment only."""
    return [
        Case(fault, hosts, strategy, moment)
        for moment in moments
        for strategy in strategies
        for hosts in counts
        for fault in faults
        if moment == moments[0] or not FAULTS[fault].is_long
    ]


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    same = [one for one in outcomes if one.same_size]
    blamed = [one.blamed_right for one in outcomes if one.blamed_right is not None]
    noticed = sorted(one.noticed_s for one in outcomes if one.noticed_s is not None)
    recovered = [one.recovery_s for one in outcomes if one.recovery_s is not None]
    return {
        "faults": len(outcomes),
        "survived": sum(one.survived for one in outcomes),
        "same_size": len(same),
        "bit_equal": sum(one.same_end for one in same),
        "within_tolerance": sum(one.same_end for one in outcomes if not one.same_size),
        "blamed": len(blamed),
        "blamed_right": sum(blamed),
        "median_recovery_s": median(recovered) if recovered else None,
        "noticed_p90_s": quantiles(noticed, n=10)[-1] if len(noticed) > 1 else None,
        "left_over": sum(one.left_over for one in outcomes),
        "open_ports": sum(one.open_ports for one in outcomes),
        "cases": [one._asdict() for one in outcomes],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--hosts", default="2,3")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--moments", default=",".join(map(str, MOMENTS)))
    parser.add_argument("--lanes", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--docs", action="store_true", help="write the table to docs/faults.md")
    asked = parser.parse_args()
    if (reason := available()) is not None:
        sys.exit(reason)
    counts, moments = (
        [int(one) for one in text.split(",")] for text in (asked.hosts, asked.moments)
    )
    chosen = cases(asked.faults.split(","), counts, asked.strategies.split(","), moments)
    keys = list(dict.fromkeys((case.hosts, case.strategy) for case in chosen))
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as parent,
        ProcessPoolExecutor(asked.lanes, get_context("spawn")) as lanes,
    ):
        ends = lanes.map(reference, (Path(parent, f"{n}x{name}") for n, name in keys), keys)
        expected = dict(zip(keys, ends, strict=True))
        folders = (Path(parent, f"run-{number}") for number in range(len(chosen)))
        wanted = (expected[case.hosts, case.strategy] for case in chosen)
        for one in lanes.map(break_run, folders, chosen, wanted):
            outcomes.append(one)
            print(one._replace(problem=""), one.problem, file=sys.stderr, flush=True)
    if asked.docs:
        write_table(outcomes)
    found = summary(outcomes)
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print({key: value for key, value in found.items() if key != "cases"})


if __name__ == "__main__":
    main()
