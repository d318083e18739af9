"""The form of collective times, chosen on measured bandwidth of 1 to 64 nodes of 8 H100.

    python benchmarks/collectives.py

The bandwidth of groups of nodes is fitted by four forms with a level of their own, so that only the
shape counts. All-gathers and reduce-scatters follow a ring: time per byte grows with the number of
ranks. All-reduces follow trees: time per byte grows with a power or the logarithm of the nodes.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Make `benchmarks` importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.validation import FOLDER

Numbers = npt.NDArray[np.floating[Any]]
OPERATIONS = ("allgather", "reducescatter", "allreduce")
# Nanoseconds per byte on so many nodes, with two parameters that are logarithms.
FORMS: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "ring: linear in nodes": lambda x, nodes: np.exp(x[0]) + np.exp(x[1]) * nodes,
    "tree: linear in log2 of nodes": lambda x, nodes: np.exp(x[0]) + np.exp(x[1]) * np.log2(nodes),
    "power of nodes": lambda x, nodes: np.exp(x[0]) * nodes ** np.exp(x[1]),
    "the same on any number of nodes": lambda x, nodes: np.exp(x[0]) + 0.0 * nodes,
}


def measured() -> tuple[Numbers, dict[str, Numbers]]:
    """Numbers of nodes, and nanoseconds per byte of each operation; one node has another link."""
    with (FOLDER / "collective_bandwidth_h100.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if float(row["nodes"]) > 1]
    nodes = np.asarray([float(row["nodes"]) for row in rows])
    return nodes, {
        name: 1.0 / np.asarray([float(row[f"{name}_GBps"]) for row in rows]) for name in OPERATIONS
    }


def study() -> dict[str, dict[str, float]]:
    """Root mean square of the log errors, by operation and form."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # only for fits

    nodes, seconds = measured()
    found: dict[str, dict[str, float]] = {}
    for name, truth in seconds.items():
        for form, predict in FORMS.items():

            def errors(x: Numbers, form: Any = predict, truth: Numbers = truth) -> Numbers:
                off: Numbers = np.log(form(x, nodes)) - np.log(truth)
                return off

            done = least_squares(errors, np.asarray([-6.0, -2.0]))
            found.setdefault(name, {})[form] = float(np.sqrt((done.fun**2).mean()))
    return found


def main() -> None:
    for name, forms in study().items():
        for form, error in forms.items():
            print(f"{name:14} {form:34} {error:6.1%}")


if __name__ == "__main__":
    main()
