"""Seconds of a step, from the cost of its pieces and the race of its streams."""

from __future__ import annotations

from shardwise.predict.configurations import Configurations
from shardwise.predict.cost import Coefficients, Hardware, durations, rules
from shardwise.predict.simulate import Times, simulate
from shardwise.spec.catalogue import step_coefficients
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.dtype import DType
from shardwise.units.unit import ModelUnits

# Devices that share the silicon a coefficient was fitted on.
_FAMILIES = {"A100": "A100", "A800": "A100", "H100": "H100", "H200": "H100", "H800": "H100"}


def coefficients_for(device: DeviceSpec) -> Coefficients | None:
    """Fitted coefficients of a device's family; None where nothing was fitted."""
    family = _FAMILIES.get(device.name.partition("-")[0].upper())
    return Coefficients(**step_coefficients(family)) if family else None


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
    )


def predict_time(
    units: ModelUnits, c: Configurations, cluster: ClusterSpec, dtype: DType, states: int
) -> Times | None:
    """Times of rows that share units and cluster; None where they cannot be known."""
    k, hardware = coefficients_for(cluster.device), hardware_of(cluster, dtype)
    # What moves between host and device under offload is not priced yet.
    if k is None or hardware is None or bool(c.offload.any()):
        return None
    return simulate(durations(units, c, hardware, k, states), rules(c, k))
