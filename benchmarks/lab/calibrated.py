"""Coefficients of the lab, fitted on six cells of the sweep; all other cells are predicted.

The fit starts from the results of `shardwise calibrate` on the hosts, which trains nothing.
"""

from __future__ import annotations

from benchmarks.lab import machine, sweep
from benchmarks.lab.cases import CLUSTER
from benchmarks.lab.sweep import Cell
from shardwise.observe.observation import Observation
from shardwise.predict.kernels import coefficients_for
from shardwise.predict.rates import Coefficients
from shardwise.spec.lookup import find_cluster
from shardwise.trials.calibrate.fit import Fit, fit

CALIBRATED_ON = [
    Cell(1e9, "ddp", 2),
    Cell(1e9, "zero3", 2),
    Cell(1e9, "hybrid", 8),
    Cell(250e6, "zero2", 8),
    Cell(4e9, "ddp", 8),
    Cell(4e9, "zero3", 8),
]


def calibrate() -> tuple[dict[Cell, Observation], Fit]:
    """Observations of all cells, and the fit on six of them."""
    if not CLUSTER.exists():
        machine.measure()
    cells = sweep.read_cells()
    if cells is None:
        sweep.measure()
        cells = sweep.read_cells() or {}
    seen = {cell: cell.case.observe(measured) for cell, measured in cells.items()}
    return seen, fit([seen[cell] for cell in CALIBRATED_ON], source="six cells of the lab's sweep")


def calibrated() -> Coefficients:
    return Coefficients(**calibrate()[1].calibration.coefficients())


def measured_alone() -> Coefficients:
    """Coefficients from `shardwise calibrate` alone: matmuls, memory and links."""
    found = coefficients_for(find_cluster(str(CLUSTER)))
    assert found is not None
    return found
