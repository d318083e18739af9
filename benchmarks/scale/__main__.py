"""`python -m benchmarks.scale [PARTS…] [--quick] [--docs] [--json]`: measure cost against scale.

Each case runs in a new process, in several rounds that alternate between cases. Tables show the
median, and the range if lowest and highest differ by more than a tenth. `--docs` writes the tables
to docs/scale.md and leaves those of other parts unchanged. `--quick` is for tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from benchmarks.page import write_section
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
    parser.add_argument("--quick", action="store_true", help="a few small cases, one round")
    parser.add_argument("--docs", action="store_true", help="write the tables to docs/scale.md")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    parser.add_argument("--child", nargs=2, metavar=("PART", "CASES"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(parts()[asked.child[0]], json.loads(asked.child[1]))
        return
    if asked.docs and asked.quick:
        sys.exit("--docs: needs all cases; leave --quick out")
    found = {}
    for name, part in parts().items():
        if asked.parts and name not in asked.parts:
            continue
        found[name] = run_part(name, part, quick=asked.quick)
        measured = [one for one in found[name] if one.runs]
        if asked.json or not measured:
            continue
        table = part.table(measured)
        print(f"\n{part.title}\n\n{table}", flush=True)
        if asked.docs:
            # Write each table as soon as it is ready: all parts together take long.
            write_section(ROOT / "docs" / "scale.md", name, table)
    if asked.json:
        print(json.dumps({name: [asdict(one) for one in each] for name, each in found.items()}))


if __name__ == "__main__":
    main()
