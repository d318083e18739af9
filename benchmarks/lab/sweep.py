"""Every strategy at every rate with two batches, on two hosts of two ranks: what the lab is for.

Ranks of one host talk freely, hosts through a limited link, so that hybrid sharding has something
to win. Rounds take every cell once in an order of their own, so that whatever else the machine does
falls on all alike. Each job ends with two profiled steps, which tell exposed communication.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lab.baseline import spread, write_run_toml
from benchmarks.lab.network import hosts, set_rate
from benchmarks.lab.session import Session
from shardwise.calibrate.runs import shares
from shardwise.observe.summary import summarise

HOSTS, RANKS_PER_HOST = 2, 2
RATES = (250e6, 500e6, 1e9, 2e9, 4e9)
BATCHES = (2, 8)
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "zero2": {"kind": "zero2"},
    "zero3": {"kind": "zero3"},
    "hybrid": {"kind": "zero3", "shard": 2, "replicate": 2},
}
MODEL = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 704, "vocab": 4096}
SEQ_LEN = 128
ROUNDS = 2
# The first steps allocate and choose buckets; the last two are profiled.
WARM_UP, PLAIN, PROFILED = 2, 6, 2
RESULTS = Path(__file__).parent / "results" / "sweep.json"


class Cell(NamedTuple):
    """One configuration at one rate."""

    rate: float
    strategy: str
    micro_batch: int

    @property
    def name(self) -> str:
        return f"{self.rate / 1e6:.0f}Mbit-{self.strategy}-{self.micro_batch}"


CELLS = [Cell(r, s, b) for r in RATES for s in STRATEGIES for b in BATCHES]


def write_cell(cell: Cell, file: Path) -> Path:
    """Its run.toml; a host's link is shared by its ranks, and `network` is per rank."""
    first = WARM_UP + PLAIN
    train = {
        "steps": first + PROFILED + 1,
        "log_every": 1000,
        "profile": {"after": first, "steps": PROFILED, "keep": 0},
    }
    strategy = {**STRATEGIES[cell.strategy], "micro_batch": cell.micro_batch}
    per_rank = cell.rate / RANKS_PER_HOST
    return write_run_toml(
        file, strategy, HOSTS, RANKS_PER_HOST, per_rank, train, MODEL, SEQ_LEN
    )  # fmt: skip


def measure(rounds: int = ROUNDS, cells: list[Cell] = CELLS) -> dict[str, Any]:
    """Measure all cells; what every round has added is kept beside this file."""
    step_s: dict[Cell, list[float]] = {}
    exposed: dict[Cell, list[float]] = {}
    with tempfile.TemporaryDirectory() as place, hosts(HOSTS, None, "sweep") as made:
        folder = Path(place)
        with Session(made, RANKS_PER_HOST, folder / "session") as session:
            for number in range(rounds):
                # By rate, since a link needs a moment to settle; cells of a rate in any order.
                order = list(cells)
                random.Random(number).shuffle(order)
                rate = None
                for cell in order:
                    if cell.rate != rate:
                        rate = cell.rate
                        set_rate(made, rate)
                    where = folder / f"{number}-{cell.name}"
                    outcome = session.run(write_cell(cell, folder / "run.toml"), where)
                    if not outcome.ok:
                        raise RuntimeError(outcome.error)
                    step_s.setdefault(cell, []).extend(outcome.step_s[WARM_UP:])
                    traces = sorted(where.glob("traces/step-*/*.json.gz"))
                    exposed.setdefault(cell, []).append(shares(summarise(traces))[1])
                    print(f"{number} {cell.name} {statistics.median(step_s[cell]) * 1e3:.0f} ms",
                          file=sys.stderr)  # fmt: skip
                if cells == CELLS:
                    RESULTS.parent.mkdir(exist_ok=True)
                    kept = _result(number + 1, cells, step_s, exposed)
                    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    return _result(rounds, cells, step_s, exposed)


def _result(
    rounds: int,
    cells: list[Cell],
    step_s: dict[Cell, list[float]],
    exposed: dict[Cell, list[float]],
) -> dict[str, Any]:
    return {
        "kind": "measured",
        "hosts": HOSTS,
        "ranks_per_host": RANKS_PER_HOST,
        "rounds": rounds,
        "cells": [
            {
                **cell._asdict(),
                **spread(step_s[cell]),
                "exposed_share": statistics.median(exposed[cell]),
            }
            for cell in cells
        ],
    }


def show(result: Mapping[str, Any]) -> None:
    print("2 hosts x 2 ranks, measured: ms per step, median, and the share exposed")
    print(f"{'':24}" + "".join(f"{name:>16}" for name in STRATEGIES))
    for rate in RATES:
        for batch in BATCHES:
            row = [c for c in result["cells"] if (c["rate"], c["micro_batch"]) == (rate, batch)]
            texts = [f"{c['median_s'] * 1e3:.0f} ({c['exposed_share']:.0%})" for c in row]
            title = f"{rate / 1e6:.0f} Mbit/s, batch {batch}"
            print(f"{title:24}" + "".join(f"{text:>16}" for text in texts))
