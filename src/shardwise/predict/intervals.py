"""Relative error of predicted tokens per second: the interval that holds for nine of ten runs."""

from __future__ import annotations

import math
from typing import Literal

from shardwise.predict.kernels import measured_attention, measured_products
from shardwise.predict.level import narrowing_factor
from shardwise.spec.catalogue import device_coefficients, figure, step_coefficients
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.level import Level
from shardwise.spec.software import architecture, find_software
from shardwise.units.unit import ModelUnits

# Kinds of runs with different errors: "experts" for all mixture-of-experts models, "low-bit" for
# matrix products in fewer than 16 bits, "adapters" for LoRA.
Regime = Literal["dense", "adapters", "experts", "RL", "low-bit"]
# Evidence for a device's step times: runs on it, its own measured kernels, or another device's.
Evidence = Literal["runs", "kernels", "relative"]

# Devices with at least five fitted runs.
_WITH_RUNS = ("A100", "A800", "H100", "H200", "H800", "RTX-A6000")

# Published runs with expert parallelism that were predicted: docs/accuracy-experts.md.
RUNS_WITH_EXPERTS = 60


def regime_of(units: ModelUnits) -> Regime:
    """The kind of run whose error interval applies to a model."""
    if any(unit.stage.experts for unit in units.units):
        return "experts"
    if any(not one.trainable for unit in units.units for one in unit.parameters):
        return "adapters"
    return "low-bit" if any(unit.stage.linear_dtype for unit in units.units) else "dense"


def evidence(cluster: ClusterSpec) -> Evidence:
    """The evidence for a cluster's step times: "runs", "kernels" or "relative" (another device)."""
    device = cluster.device
    if cluster.calibration is not None or device_coefficients(device.name) is not None:
        return "runs"
    if device.name.partition("-")[0] in _WITH_RUNS or device.name in _WITH_RUNS:
        return "runs"
    if architecture(device) == "cdna":
        # Its kernels were measured for inference; published runs deviate far in both directions.
        return "relative"
    software = find_software(cluster.software)
    own = measured_attention(device, software).own or measured_products(device).own
    return "kernels" if own else "relative"


def is_fitted(cluster: ClusterSpec) -> bool:
    """Whether step times of a cluster are fitted to runs on such devices or calibrated on it."""
    return evidence(cluster) == "runs"


def error_interval(cluster: ClusterSpec, regime: Regime = "dense") -> tuple[float, float]:
    """Relative errors (low, high) that predicted tokens/s stay within in nine of ten runs.

    Another stack, more nodes or another device than was measured make the interval wider.
    """
    if cluster.calibration is not None:
        return cluster.calibration.interval
    log = _log_factor(cluster, regime) * width_growth(cluster.nodes)
    if cluster.level is not None:
        log *= narrowing_factor(regime, cluster.level.steps)
    # Rounded because math libraries differ in the last bit of a power.
    return round(math.exp(-log) - 1.0, 9), round(math.exp(log) - 1.0, 9)


def after_a_step(cluster: ClusterSpec, regime: Regime) -> tuple[float, float] | None:
    """The error interval after one more measured step; None on a CPU or a calibrated cluster."""
    if cluster.calibration is not None or cluster.device.is_cpu:
        return None
    steps = 1 if cluster.level is None else cluster.level.steps + 1
    return after_steps(cluster, regime, steps)


def after_steps(cluster: ClusterSpec, regime: Regime, steps: int) -> tuple[float, float]:
    """The error interval after `steps` steps of the stack have been measured on the cluster."""
    measured = Level(factor=1.0, steps=min(steps, 1000), regime=regime)
    return error_interval(cluster.but(calibration=None, level=measured), regime)


def _log_factor(cluster: ClusterSpec, regime: Regime) -> float:
    """Natural logarithm of the error factor, up or down; independent parts add in squares."""
    stack = find_software(cluster.software).stack
    known = f"{stack}.level" in step_coefficients()
    parts = [figure(f"interval-{regime}-{'known' if known else 'new'}")]
    near = evidence(cluster)
    # A CPU has no published runs; its predictions are compared only with its own steps.
    if near != "runs" and not cluster.device.is_cpu:
        parts.append(figure("interval-device" if near == "kernels" else "interval-relative"))
    return math.sqrt(sum(math.log(part) ** 2 for part in parts))


def width_growth(nodes: int) -> float:
    """Factor on the logarithmic width of the error interval, from the number of nodes; 1 or more.

    It is 1 up to the number of nodes of fitted runs.
    """
    doublings = max(0.0, math.log2(max(1, nodes) / figure("interval_nodes")))
    return 1.0 + figure("interval_per_doubling") * doublings
