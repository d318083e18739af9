"""Layouts of one model on two hosts of two ranks, at several link rates.

Every layout trains the same sequences in a step. The hosts are measured by `shardwise calibrate`,
then six cells are fitted; all others are predicted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lab import machine
from benchmarks.lab.cases import (
    HOSTS,
    RANKS_PER_HOST,
    RESULTS,
    Case,
    load,
    measure_cases,
    save,
    save_as,
)
from benchmarks.lab.network import QUEUE_S, SHORT_BURST_S
from benchmarks.lab.quiet import usage, wait_until_quiet
from shardwise.observe.observation import Observation, units_of
from shardwise.predict.kernels import coefficients_for
from shardwise.predict.rates import Coefficients
from shardwise.spec.lookup import find_cluster
from shardwise.trials.calibrate.fit import Fit, fit


def coefficients_of(found: Fit) -> Coefficients:
    """The fitted coefficients."""
    return Coefficients(**found.calibration.coefficients())


class Cell(NamedTuple):
    """One layout at one link rate; `batch` is the sequences in a step of all ranks."""

    rate: float
    layout: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.rate / 1e6:.0f}Mbit-{self.layout.replace(', ', '-')}-{self.batch}"


@dataclass(frozen=True)
class Layouts:
    """Layouts, rates and batches to train, and which cells are fitted.

    `patience_s` is for a machine that others use at times: jobs wait until it is quiet, for so many
    seconds in all.
    """

    name: str
    model: Mapping[str, Any]
    layouts: Mapping[str, Mapping[str, Any]]
    rates: tuple[float, ...]
    batches: tuple[int, ...]
    fitted: tuple[Cell, ...]
    train: Mapping[str, Any] = field(default_factory=dict)
    plain: int = 4
    rounds: int = 2
    queue_s: float = QUEUE_S
    patience_s: float = 1500.0

    @property
    def cells(self) -> list[Cell]:
        return [
            Cell(rate, layout, batch)
            for rate in self.rates
            for layout in self.layouts
            for batch in self.batches
        ]

    @property
    def held_out(self) -> list[Cell]:
        return [cell for cell in self.cells if cell not in self.fitted]

    @property
    def groups(self) -> list[tuple[float, int]]:
        """Rates and batches: cells that agree on both are ranked."""
        return [(rate, batch) for rate in self.rates for batch in self.batches]

    @property
    def cluster(self) -> Path:
        """The file of what `shardwise calibrate` measured on the hosts."""
        return RESULTS / f"{self.name}-cluster.toml"

    @property
    def written(self) -> str:
        """The name of the saved predictions, which were written before the cells were trained."""
        return f"{self.name}-predicted"

    def case(self, cell: Cell) -> Case:
        layout = self.layouts[cell.layout]
        data_parallel = HOSTS * RANKS_PER_HOST // layout.get("tensor", 1)
        strategy = {**layout, "micro_batch": cell.batch // data_parallel}
        return Case(cell.name, cell.rate, strategy, self.model, profiled=cell in self.fitted,
                    plain=self.plain, rounds=self.rounds, burst_s=SHORT_BURST_S,
                    queue_s=self.queue_s, train=self.train)  # fmt: skip

    def calibrate(self) -> None:
        """Measure the hosts with `shardwise calibrate`, and save the cluster in results/.

        After the patience is over, also while others use the machine: ranks go before them.
        """
        wait_until_quiet(lambda: usage(()), time.monotonic() + self.patience_s)
        found = machine.measure(self.cluster, SHORT_BURST_S, max(self.rates), force=True)
        print(found["screen"], file=sys.stderr, flush=True)

    def measure(self) -> None:
        """Calibrate the hosts and train all cells, the fitted ones first; save all in results/.

        Predictions of the others are saved before these are trained.
        """
        self.calibrate()
        first = measure_cases([self.case(cell) for cell in self.fitted], self.name, self.patience_s)
        predicted = self.predict(coefficients_of(self.fit()), self.held_out)
        step_s = {cell.name: seconds for cell, seconds in predicted.items()}
        save_as(self.written, {"kind": "predicted", "step_s": step_s})
        print("predicted", file=sys.stderr, flush=True)
        rest = measure_cases([self.case(cell) for cell in self.held_out], None, self.patience_s)
        save(self.name, {**first, **rest})

    def observations(self, cells: Sequence[Cell]) -> dict[Cell, Observation]:
        """These of the measured cells, with the runs to predict."""
        found, cluster = load(self.name), find_cluster(str(self.cluster))
        if found is None:
            file = f"{RESULTS / self.name}.json"
            raise FileNotFoundError(f"{file}; run python -m benchmarks.lab {self.name}")
        cases = found["cases"]
        return {cell: self.case(cell).observe(cases[cell.name], cluster) for cell in cells}

    def calibrated(self) -> Coefficients:
        """The coefficients that `shardwise calibrate` measured on the hosts."""
        found = coefficients_for(find_cluster(str(self.cluster)))
        assert found is not None
        return found

    def fit(self) -> Fit:
        """The fit on the fitted cells, which starts from what `shardwise calibrate` measured."""
        seen = self.observations(self.fitted)
        return fit(list(seen.values()), source=f"six cells of the lab's {self.name} sweep")

    def predict(self, k: Coefficients, cells: Sequence[Cell]) -> dict[Cell, float]:
        """Predicted seconds of a step by cell."""
        cluster, found = find_cluster(str(self.cluster)), {}
        for cell in cells:
            run = self.case(cell).run(cluster)
            one = Observation(run, units_of(run), 0.0, None, None)
            found[cell] = one.predict(k, run.cluster).step_s
        return found
