"""Seconds of a step, from the cost of its operations and the simulation of its streams."""

from __future__ import annotations

from shardwise.predict.configurations import Configurations, Floats
from shardwise.predict.cost import Coefficients, Hardware, durations, rules
from shardwise.predict.simulate import Times, simulate
from shardwise.spec.catalogue import coefficient, figure, step_coefficients
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.dtype import DType
from shardwise.units.unit import ModelUnits

# Devices that share the silicon a coefficient was fitted on.
_FAMILIES = {"A100": "A100", "A800": "A100", "H100": "H100", "H200": "H100", "H800": "H100"}
# Others are taken for relatives of the one or the other, by their dense half-precision peak.
_NEWER_PEAK = 500e12


def fitted_family(device: DeviceSpec) -> str | None:
    """The family whose measured runs a device's coefficients come from, if there is one."""
    return _FAMILIES.get(device.name.partition("-")[0].upper())


def is_fitted(cluster: ClusterSpec) -> bool:
    """Whether its step times follow from runs on such devices, or on itself."""
    return cluster.calibration is not None or fitted_family(cluster.device) is not None


def coefficients_for(cluster: ClusterSpec) -> Coefficients | None:
    """What was calibrated, else those of the device's family or the nearest; None for a CPU."""
    if cluster.calibration is not None:
        return Coefficients(**cluster.calibration.coefficients())
    device = cluster.device
    if device.is_cpu:
        return None
    peak = device.peak_flops("bf16") or device.peak_flops("fp16") or 0.0
    nearest = "H100" if peak >= _NEWER_PEAK else "A100"
    fitted = Coefficients(**step_coefficients(fitted_family(device) or nearest))
    # Published runs used optimizers of many small kernels; the engine's are fused.
    return fitted._replace(optimizer_factor=figure("fused_optimizer"))


def error_interval(cluster: ClusterSpec) -> tuple[float, float]:
    """How far predicted tokens/s lie off the measured ones, in nine of ten runs."""
    if cluster.calibration is not None:
        return cluster.calibration.interval
    return coefficient("step-interval" if is_fitted(cluster) else "step-interval-other")


def hardware_of(cluster: ClusterSpec, dtype: DType) -> Hardware | None:
    """The rates a cost needs; None where the cluster does not tell them."""
    peak = cluster.device.peak_flops(dtype)
    if peak is None or (cluster.nodes > 1 and cluster.network is None):
        return None
    return Hardware(
        peak_flops=peak,
        memory_bandwidth=cluster.device.memory_bandwidth,
        link_bandwidth=cluster.device.link_bandwidth,
        network_bandwidth=cluster.network or cluster.device.link_bandwidth,
        devices_per_node=cluster.devices_per_node,
        pod_nodes=cluster.pod_nodes or cluster.nodes,
        oversubscription=cluster.oversubscription,
        host_link=figure("host_link") * 1e9,
        host_memory=figure("host_memory") * 1e9,
        gloo=cluster.device.is_cpu,
    )


def predict_time(
    units: ModelUnits,
    c: Configurations,
    cluster: ClusterSpec,
    dtype: DType,
    states: int,
    *,
    latency: bool = True,
    network: Floats | None = None,
) -> Times | None:
    """Times of rows that share units and cluster; None where they cannot be known.

    Without `latency`, messages take no longer than their bytes. `network` says by row how many
    times as fast the slowest way between devices is.
    """
    k, hardware = coefficients_for(cluster), hardware_of(cluster, dtype)
    if k is None or hardware is None:
        return None
    if network is not None:
        way = "network_bandwidth" if cluster.nodes > 1 else "link_bandwidth"
        hardware = hardware._replace(**{way: getattr(hardware, way) * network})
    if not latency:
        k = k._replace(hop_latency_s=0.0, network_latency_s=0.0)
    return simulate(durations(units, c, hardware, k, states), rules(c, k, hardware.gloo))
