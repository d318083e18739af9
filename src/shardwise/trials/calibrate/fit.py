"""Fit coefficients to a few short runs by regularised least squares.

Few runs do not determine all coefficients. Each has a log-normal prior around its start value, with
the standard deviation in PRIOR_STD; a coefficient that the runs do not determine stays there.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardwise.observe.observation import Observation
from shardwise.predict.intervals import after_steps, regime_of
from shardwise.predict.kernels import coefficients_for
from shardwise.predict.rates import Coefficients
from shardwise.spec.calibration import Calibration
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.record import SpecError

# Start values for CPUs, relative to the catalogue's placeholder peaks.
CPU = Coefficients(
    matmul_efficiency=0.02,
    matmul_half_s=1e-9,
    attention_efficiency=0.02,
    elementwise_factor=5.0,
    launch_s=1e-5,
    link_efficiency=0.05,
    network_efficiency=0.9,
    hop_latency_s=1e-3,
    network_latency_s=1e-3,
    contention=0.3,
    optimizer_factor=10.0,
    overhead_s=5e-3,
    hook_s=1.5e-3,
    reduce_speedup=2.0,
    exchange_latency_s=2e-3,
)
# Standard deviation of each coefficient's logarithm around its start value. Coefficients not named
# here are not fitted: they are known better than from a few runs.
PRIOR_STD = {
    "matmul_efficiency": 1.5,
    "elementwise_factor": 0.7,
    "link_efficiency": 1.5,
    "network_efficiency": 0.1,
    "hop_latency_s": 1.0,
    "network_latency_s": 2.0,
    "contention": 0.7,
    "optimizer_factor": 0.7,
    "overhead_s": 1.0,
    "hook_s": 1.0,
    "reduce_speedup": 0.2,
    "exchange_latency_s": 1.0,
}
# Standard deviation of a measured step, and of its exposed communication, as a share of the step.
NOISE = 0.03


class Fit(NamedTuple):
    """The fitted calibration, and its relative error for each run."""

    calibration: Calibration
    # Predicted / measured - 1.
    errors: list[float]


def require_scipy() -> None:
    """Raise SpecError if scipy is missing, before any work is done."""
    if importlib.util.find_spec("scipy") is None:
        raise SpecError(
            "calibrate: needs scipy; install it with 'pip install shardwise[calibrate]'"
        )


def fit(
    observations: Sequence[Observation],
    cluster: Callable[[Observation], ClusterSpec] = lambda one: one.run.cluster,
    source: str = "",
    start: Coefficients | None = None,
) -> Fit:
    """Fit coefficients to `observations`; `cluster` returns the cluster of an observation.

    The prior is at `start`; unset, at the coefficients of the cluster.
    """
    if not observations:
        raise SpecError("calibrate: no run given; add --from-run with a run folder")
    require_scipy()
    from scipy.optimize import least_squares

    start = start or coefficients_for(cluster(observations[0])) or CPU
    names = list(PRIOR_STD)
    base = np.log([getattr(start, name) or 1e-6 for name in names])
    prior_std = np.asarray([PRIOR_STD[name] for name in names])

    def coefficients(packed: Any) -> Coefficients:
        return unpack(start, dict(zip(names, np.exp(packed).tolist(), strict=True)))

    def residuals(packed: Any) -> Any:
        k = coefficients(packed)
        errors = []
        for one in observations:
            parts = one.predict(k, cluster(one))
            errors.append(math.log(parts.step_s / one.step_s) / NOISE)
            if one.exposed_s is not None:
                errors.append((parts.exposed_s - one.exposed_s) / one.step_s / NOISE)
        return np.concatenate([errors, (packed - base) / prior_std])

    done = least_squares(residuals, base, loss="soft_l1", max_nfev=200)
    k = coefficients(done.x)
    errors = [one.predict(k, cluster(one)).step_s / one.step_s - 1 for one in observations]
    known = {name: float(value) for name, value in k._asdict().items()}
    least = after_steps(
        cluster(observations[0]), regime_of(observations[0].units), len(observations)
    )
    calibration = Calibration(**known, interval=_interval(errors, least), source=source)
    return Fit(calibration, errors)


def _interval(errors: Sequence[float], least: tuple[float, float]) -> tuple[float, float]:
    """The relative interval (low, high) of predicted tokens/s, from errors of the fitted runs.

    It is never narrower than `least`, because fitted runs say little about the next one.
    """
    spread = 2 * float(np.std(errors))
    low, high = least
    return min(low, -spread), max(high, spread / (1 - min(spread, 0.5)))


def unpack(start: Coefficients, values: dict[str, float]) -> Coefficients:
    """`start` with fitted `values`; the efficiency of attention scales with that of matmuls."""
    scale = values["matmul_efficiency"] / start.matmul_efficiency
    return start._replace(
        **values,
        attention_efficiency=min(10.0, start.attention_efficiency * scale),
    )
