"""Time of `shardwise estimate` from start to answer, compared with importing its libraries.

    python benchmarks/startup.py [--rounds 15] [--json]

Rounds of new interpreters are interleaved. Printed: medians, and the median ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

FLOOR = [sys.executable, "-c", "import numpy, pydantic, typer, rich"]
ESTIMATE = [
    *(str(Path(sys.executable).with_name("shardwise")), "estimate"),
    *("--model", "llama-3-70b", "--cluster", "8x8xH100-SXM@400Gbps", "--recompute", "full"),
]


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, float]:
    for command in (FLOOR, ESTIMATE):  # warm up byte code and file cache
        seconds(command)
    pairs = [(seconds(FLOOR), seconds(ESTIMATE)) for _ in range(rounds)]
    ratios = [ours / floor for floor, ours in pairs]
    return {
        "floor_s": statistics.median(floor for floor, _ in pairs),
        "estimate_s": statistics.median(ours for _, ours in pairs),
        "ratio_median": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(
            f"imports only {found['floor_s']:.3f} s, estimate {found['estimate_s']:.3f} s, "
            f"ratio {found['ratio_median']:.2f} "
            f"({found['ratio_low']:.2f} to {found['ratio_high']:.2f})"
        )


if __name__ == "__main__":
    main()
