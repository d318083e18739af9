"""Sharding and tensor parallelism together, on two hosts of two ranks behind limited links.

A tensor group lies inside a host or has one rank on each. Every layout trains the same sequences
in a step. The cluster is measured by `shardwise calibrate` on the hosts, then six cells are fitted;
all others are predicted.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

from benchmarks.lab import machine
from benchmarks.lab.cases import (
    HOSTS,
    MODEL,
    RANKS_PER_HOST,
    RESULTS,
    Case,
    load,
    measure_cases,
)
from benchmarks.lab.network import SHORT_BURST_S
from benchmarks.lab.quiet import usage, wait_until_quiet
from shardwise.observe.observation import Observation
from shardwise.spec.lookup import find_cluster

NAME = "tensor"
CLUSTER = RESULTS / "tensor-cluster.toml"
# A small vocabulary, so that most of the model is in its blocks.
SMALL = {**MODEL, "vocab": 1024}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"kind": "zero3"},
    "hybrid": {"kind": "zero3", "shard": 2, "replicate": 2},
    "zero3, tensor inside": {"kind": "zero3", "tensor": 2},
    "zero3, tensor across": {"kind": "zero3", "tensor": 2, "tensor_across_nodes": True},
    "zero2, tensor inside": {"kind": "zero2", "tensor": 2},
}
INSIDE, ACROSS = "zero3, tensor inside", "zero3, tensor across"
RATES = (250e6, 500e6, 1e9)
# Sequences per step of all ranks.
BATCHES = (16, 32)
PLAIN, ROUNDS = 4, 2
# For a machine that others use at times.
PATIENCE_S = 1500.0


class Cell(NamedTuple):
    """One layout at one rate with one batch."""

    rate: float
    layout: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.rate / 1e6:.0f}Mbit-{self.layout.replace(', ', '-')}-{self.batch}"

    @property
    def case(self) -> Case:
        layout = LAYOUTS[self.layout]
        data_parallel = HOSTS * RANKS_PER_HOST // layout.get("tensor", 1)
        strategy = {**layout, "micro_batch": self.batch // data_parallel}
        return Case(self.name, self.rate, strategy, SMALL, profiled=self in CALIBRATED_ON,
                    plain=PLAIN, rounds=ROUNDS, burst_s=SHORT_BURST_S)  # fmt: skip


CELLS = [Cell(rate, layout, batch) for rate in RATES for layout in LAYOUTS for batch in BATCHES]
# Chosen before anything was measured: every layout but one, all rates, both batches.
CALIBRATED_ON = [
    Cell(500e6, "zero3", 32),
    Cell(250e6, "hybrid", 16),
    Cell(1e9, INSIDE, 16),
    Cell(250e6, INSIDE, 32),
    Cell(500e6, ACROSS, 16),
    Cell(1e9, ACROSS, 32),
]


def measure() -> dict[str, Any]:
    """Calibrate the hosts, train all cells and save the results in results/."""
    wait_until_quiet(lambda: usage(()), time.monotonic() + PATIENCE_S)
    machine.measure(CLUSTER, SHORT_BURST_S)
    print("calibrated", file=sys.stderr, flush=True)
    measure_cases([cell.case for cell in CELLS], keep_as=NAME, patience_s=PATIENCE_S)
    return load(NAME) or {}


def observations() -> dict[Cell, Observation]:
    found, cluster = load(NAME), find_cluster(str(CLUSTER))
    if found is None:
        raise FileNotFoundError(f"{RESULTS / NAME}.json; run python -m benchmarks.lab tensor")
    return {cell: cell.case.observe(found["cases"][cell.name], cluster) for cell in CELLS}
