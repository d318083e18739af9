"""What six cells of the sweep tell about the lab; all else is predicted from it.

They start from what `shardwise calibrate` has measured on the hosts without training anything.
"""

from __future__ import annotations

from benchmarks.lab import machine, sweep
from benchmarks.lab.cases import CLUSTER
from benchmarks.lab.sweep import Cell
from shardwise.calibrate.fit import Fit, fit
from shardwise.calibrate.runs import Observation
from shardwise.predict.cost import Coefficients
from shardwise.predict.time import coefficients_for
from shardwise.spec.lookup import find_cluster

CALIBRATED_ON = [
    Cell(1e9, "ddp", 2),
    Cell(1e9, "zero3", 2),
    Cell(1e9, "hybrid", 8),
    Cell(250e6, "zero2", 8),
    Cell(4e9, "ddp", 8),
    Cell(4e9, "zero3", 8),
]


def calibrate() -> tuple[dict[Cell, Observation], Fit]:
    """What the sweep measured, and what six of its cells tell."""
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
    """Without any training: what was measured of products, memory and links."""
    found = coefficients_for(find_cluster(str(CLUSTER)))
    assert found is not None
    return found
