"""Every cell of the sweep as a predicted and a measured StepProfile, for `shardwise report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lab.calibrated import calibrate
from benchmarks.lab.sweep import Cell, read_cells
from shardwise.predict.api import estimate_run
from shardwise.spec.calibration import Calibration
from shardwise.spec.version import __version__
from shardwise.step.profile import Provenance, StepProfile, TimeProfile, throughput_of


def measure() -> list[dict[str, Any]]:
    fitted = calibrate()[1].calibration
    found = read_cells() or {}
    pairs = []
    for cell, measured in found.items():
        predicted = _predicted(cell, fitted)
        real = _measured(predicted, measured)
        pairs.append(
            {"name": cell.name, "predicted": predicted.to_dict(), "measured": real.to_dict()}
        )
    return pairs


def _predicted(cell: Cell, fitted: Calibration) -> StepProfile:
    run = cell.case.run()
    return estimate_run(run._replace(cluster=run.cluster.but(calibration=fitted)))


def _measured(predicted: StepProfile, found: Mapping[str, Any]) -> StepProfile:
    """The measured profile of a cell: only times, because a sweep saves no others."""
    step = float(found["median_s"])
    exposed = float(found["exposed_share"]) * step
    assert predicted.work is not None
    return predicted._replace(
        provenance=Provenance("measured", __version__, "the lab's sweep"),
        memory=None,
        traffic=(),
        time=TimeProfile(
            step_s=step,
            step_s_spread=(float(found["p10_s"]), float(found["p90_s"])),
            compute_s=step - exposed,
            exposed_communication_s=exposed,
        ),
        throughput=throughput_of(predicted.work, step, int(predicted.cluster["devices"]), None),
        bottleneck=None,
    )


def show(result: Sequence[Mapping[str, Any]]) -> None:
    print(f"{len(result)} pairs; save them with --json, view them with `shardwise report`")
