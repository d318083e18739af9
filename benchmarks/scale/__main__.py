"""`python -m benchmarks.scale [PARTS…] [--quick] [--docs] [--json]`: what it costs as work grows.

Every case runs in a process of its own, cases take turns, and that several times; medians, with
the lowest and the highest where they differ by more than a tenth. `--docs` writes the tables into
docs/scale.md; those of parts that were not run stay as they are. `--quick` is for tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.scale.cost import ROOT, Part, child, run_part


def parts() -> dict[str, Part]:
    from benchmarks.scale import checkpoints, joining, pages, planner, simulator, traces, trainer

    return {
        "plan": planner.PART,
        "timeline": simulator.PART,
        "trainer": trainer.PART,
        "checkpoints": checkpoints.PART,
        "traces": traces.PART,
        "joining": joining.PART,
        "pages": pages.PART,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *parts()])
    parser.add_argument("--quick", action="store_true", help="few small cases, once")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("PART", "CASES"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(parts()[asked.child[0]], json.loads(asked.child[1]))
        return
    found = {}
    for name, part in parts().items():
        if not asked.parts or name in asked.parts:
            found[name] = run_part(name, part, quick=asked.quick)
    if asked.json:
        print(json.dumps({name: [asdict(one) for one in each] for name, each in found.items()}))
        return
    tables = {
        name: parts()[name].table([one for one in each if one.runs])
        for name, each in found.items()
        if any(one.runs for one in each)
    }
    for name, text in tables.items():
        print(f"\n{parts()[name].title}\n\n{text}")
    if asked.docs:
        if asked.quick:
            sys.exit("--docs: needs all cases; leave --quick out")
        _write(ROOT / "docs" / "scale.md", tables)


def _write(page: Path, tables: dict[str, str]) -> None:
    """Between `<!-- measured: NAME -->` and `<!-- end -->`, in the page as it is."""
    text = page.read_text()
    for name, table in tables.items():
        before, begin, after = text.partition(f"<!-- measured: {name} -->\n")
        _, end, rest = after.partition("<!-- end -->")
        if not end:
            sys.exit(f"{page.name} has no place for {name}")
        text = f"{before}{begin}\n{table}\n{end}{rest}"
    page.write_text(text)


if __name__ == "__main__":
    main()
