"""`python -m benchmarks.faults [WORDS…] [--json] [--docs]`: run the fault matrix.

With words, only cases whose name contains one of them are run. `--docs` writes docs/faults.md and
leaves the rows of other cases unchanged.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.faults.cases import ROOT, Outcome, all_cases, run_cases
from benchmarks.page import read_section, rows, write_section

HEAD = ("Fault", "Moment", "Exit code", "Resumed from step", "Same result", "Message")
PAGE = ROOT / "docs" / "faults.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="run only cases whose name contains one of these")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.add_argument("--docs", action="store_true", help="write the table to docs/faults.md")
    asked = parser.parse_args()
    cases = [c for c in all_cases() if not asked.words or any(w in str(c) for w in asked.words)]
    found: list[Outcome] = []
    for outcome in run_cases(cases):
        found.append(outcome)
        state = "; ".join(outcome.problems) or "as expected"
        print(f"{outcome.case}: {state}", file=sys.stderr, flush=True)
    if asked.docs:
        _write_table(found)
    if asked.json:
        print(json.dumps([{**o._asdict(), "case": str(o.case)} for o in found], indent=1))
    failed = [outcome for outcome in found if outcome.problems]
    print(f"{len(found) - len(failed)} of {len(found)} cases as expected", file=sys.stderr)
    sys.exit(1 if failed else 0)


def _write_table(found: list[Outcome]) -> None:
    every = {}
    for line in read_section(PAGE, "processes").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) == len(HEAD):
            every[cells[0], cells[1]] = cells
    every |= {(one.case.fault, one.case.moment): _row(one) for one in found}
    body = [every[case] for case in all_cases() if case in every]
    write_section(PAGE, "processes", rows(HEAD, body))


def _row(one: Outcome) -> list[str]:
    message = one.told.replace("|", "\\|").replace(str(Path.home()), "~")
    message = "".join(c for c in message if c.isprintable())[:180]
    loaded = "" if one.loaded_step is None else str(one.loaded_step)
    same = "yes" if one.equal and not one.problems else "**no**: " + "; ".join(one.problems)
    return [one.case.fault, one.case.moment, str(one.exit_code), loaded, same, message]


if __name__ == "__main__":
    main()
