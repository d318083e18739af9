"""Correct the predictions for a run by one or a few measured steps of it or of similar runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from shardwise.observe.observation import Observation, read_observation, units_of
from shardwise.predict.intervals import regime_of
from shardwise.predict.kernels import coefficients_for
from shardwise.spec.level import Level
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec

_SECONDS = re.compile(r"([0-9]*\.?[0-9]+)\s*(ms|s)?")


def with_measured(run: RunSpec, measured: Sequence[str | float | Path]) -> RunSpec:
    """Copy of `run` whose cluster has a level: measured over predicted seconds per step.

    Each item of `measured` is the seconds of a step of `run` itself (3.2, "3.2s", "3200ms"), or the
    folder of another run that was measured. The level is the geometric mean over the items.
    """
    observations = [_observation(run, one) for one in measured]
    ratios = [math.log(one.step_s / _predicted_s(run, one)) for one in observations]
    regimes = {regime_of(one.units) for one in observations}
    if len(regimes) > 1:
        raise SpecError(f"measured: runs of one kind, not {' and '.join(sorted(regimes))}")
    factor = round(math.exp(sum(ratios) / len(ratios)), 6)
    if not 0.01 < factor < 100:
        raise SpecError(
            f"measured: {factor:.3g} times the predicted step; check its unit, and that it is of "
            "this run"
        )
    level = Level(factor=factor, steps=len(ratios), regime=regimes.pop())
    return run._replace(cluster=run.cluster.but(level=level))


def _observation(run: RunSpec, measured: str | float | Path) -> Observation:
    """Read one item of `measured`: a step time, or the folder of a measured run."""
    if isinstance(measured, int | float):
        return _own_observation(run, float(measured))
    found = _SECONDS.fullmatch(str(measured).strip().lower())
    if found:
        return _own_observation(run, float(found[1]) * (1e-3 if found[2] == "ms" else 1.0))
    folder = Path(measured)
    if not (folder / "run.toml").is_file():
        raise SpecError(
            f"measured: cannot read {str(measured)[:60]!r}; write the seconds of a step, such as "
            "3.2s, or the folder of a run"
        )
    return read_observation(folder)


def _own_observation(run: RunSpec, step_s: float) -> Observation:
    """An observation that a step of `run` itself takes `step_s` seconds."""
    if not 1e-6 < step_s < 1e6:
        raise SpecError(f"measured: a step of {step_s:g} s is none; write it like 3.2s")
    resolved = run.resolved()
    return Observation(resolved, units_of(resolved), step_s, None, None)


def _predicted_s(run: RunSpec, one: Observation) -> float:
    """Predicted seconds of a step of `one`, not corrected by any measured step."""
    cluster = one.run.cluster.but(level=None, software=run.cluster.software)
    if cluster.device.name != run.cluster.device.name:
        raise SpecError(
            f"measured: a run on {cluster.device.name} says nothing of {run.cluster.device.name}"
        )
    k = coefficients_for(cluster)
    if k is None:
        raise SpecError(
            "measured: step times of these CPUs are not known; measure them with 'shardwise "
            "calibrate'"
        )
    return one.predict(k, cluster).step_s
