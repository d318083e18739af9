"""The main experiment: every strategy at every rate with two batches, on two hosts of two ranks.

Only the link between the hosts is limited, so that hybrid sharding can be faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.lab.cases import STRATEGIES, Case, load, measure_cases

RATES = (250e6, 500e6, 1e9, 2e9, 4e9)
BATCHES = (2, 8)


class Cell(NamedTuple):
    """One configuration at one rate."""

    rate: float
    strategy: str
    micro_batch: int

    @property
    def name(self) -> str:
        return f"{self.rate / 1e6:.0f}Mbit-{self.strategy}-{self.micro_batch}"

    @property
    def case(self) -> Case:
        strategy = {**STRATEGIES[self.strategy], "micro_batch": self.micro_batch}
        return Case(self.name, self.rate, strategy)


CELLS = [Cell(r, s, b) for r in RATES for s in STRATEGIES for b in BATCHES]


def measure() -> dict[str, Any]:
    """Measure all cells and save the results in results/."""
    measure_cases([cell.case for cell in CELLS], keep_as="sweep")
    return load("sweep") or {}


def read_cells() -> dict[Cell, Mapping[str, Any]] | None:
    """Results of the last sweep; None if there is none."""
    found = load("sweep")
    if found is None:
        return None
    return {cell: found["cases"][cell.name] for cell in CELLS}


def show(result: Mapping[str, Any]) -> None:
    print("2 hosts x 2 ranks, measured: median ms per step (share of exposed communication)")
    print(f"{'':24}" + "".join(f"{name:>16}" for name in STRATEGIES))
    for rate in RATES:
        for batch in BATCHES:
            cases = [result["cases"][Cell(rate, name, batch).name] for name in STRATEGIES]
            texts = [f"{c['median_s'] * 1e3:.0f} ({c['exposed_share']:.0%})" for c in cases]
            title = f"{rate / 1e6:.0f} Mbit/s, batch {batch}"
            print(f"{title:24}" + "".join(f"{text:>16}" for text in texts))
