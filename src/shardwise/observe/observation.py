"""The measured step time of a run folder, and the prediction for the same run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.observe.run_folder import TRACES, profiled_windows, traces_in
from shardwise.observe.summary import Summary, summarise
from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import hardware_of
from shardwise.predict.rates import Coefficients
from shardwise.predict.time import times_of
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.read_file import read_json
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, read_run
from shardwise.spec.unequal import check_equal
from shardwise.units.load import job_units
from shardwise.units.unit import ModelUnits


class StepSeconds(NamedTuple):
    """Predicted seconds of one step: in total, of compute, and of exposed communication.

    Compute includes copies and the optimizer.
    """

    step_s: float
    compute_s: float
    exposed_s: float


class Observation(NamedTuple):
    """A run and its measured seconds per step.

    `compute_s` and `exposed_s` (exposed communication) are None without a trace.
    """

    run: RunSpec
    units: ModelUnits
    step_s: float
    compute_s: float | None
    exposed_s: float | None

    def predict(self, k: Coefficients, cluster: ClusterSpec) -> StepSeconds:
        """Predict the seconds of a step on `cluster` with the coefficients `k`."""
        strategy, job = self.run.strategy, self.run.job
        hardware = hardware_of(cluster, strategy.param_dtype)
        if hardware is None:
            raise SpecError(
                f"calibrate: {cluster} has no network; append its bandwidth, like @400Gbps"
            )
        columns = Configurations.of([strategy])
        times = times_of(self.units, columns, hardware, k, job.optimizer)
        optimizer = float(times.optimizer_s[0])
        return StepSeconds(
            float(times.step_s[0]),
            float(times.compute_s[0]) + float(times.copy_s[0]) + optimizer,
            float(times.exposed_communication_s[0]),
        )


def read_observation(folder: Path) -> Observation:
    """Read a run folder: run.toml, measurement.json and, if the run was profiled, its traces."""
    run = check_equal(read_run(folder / "run.toml"), "calibrate").resolved()
    path = folder / "measurement.json"
    try:
        step_s = float(read_json(path, "calibrate")["time"]["step_s"])
        if not 0.0 < step_s < math.inf:
            raise ValueError("no step takes so long")
    except (SpecError, ValueError, KeyError, TypeError):
        raise SpecError(
            f"calibrate: {path} has no step time; train at least 8 steps with train.measure = true"
        ) from None
    compute = exposed = None
    if (found := read_step_shares(folder)) is not None:
        compute, exposed = (share * step_s for share in found)
    return Observation(run, units_of(run), step_s, compute, exposed)


def read_step_shares(folder: Path) -> tuple[float, float] | None:
    """Shares of a step outside and inside exposed communication; None without a trace.

    See `step_shares`; the traces are those of the last profiled window of the run in `folder`.
    """
    windows = profiled_windows(folder / TRACES)
    files = traces_in(windows[-1]) if windows else []
    return step_shares(summarise(files)) if files else None


def units_of(run: RunSpec) -> ModelUnits:
    """The units of a run's model, with `blocks_per_unit` blocks in each FSDP unit."""
    strategy = run.strategy
    units = job_units(run.model, run.job, strategy, run.cluster)
    return units.grouped(strategy.blocks_per_unit)


def step_shares(summary: Summary) -> tuple[float, float]:
    """Shares of a step outside and inside exposed communication, means over ranks.

    The first counts idle time and exposed copies as compute.
    """

    def mean(values: list[Any]) -> float:
        return float(sum(values)) / len(values)

    exposed = mean(
        [r.profiled.exposed_communication_ns / max(1, r.profiled.window_ns) for r in summary.ranks]
    )
    return 1 - exposed, exposed
