"""Rates and coefficients of a cluster: what its data sheet promises, and what was measured."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Floats
from shardwise.spec.catalogue import (
    coefficient,
    device_coefficients,
    figure,
    step_coefficients,
)
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.dtype import DType

# Devices that share the silicon a coefficient was fitted on.
_FAMILIES = {"A100": "A100", "A800": "A100", "H100": "H100", "H200": "H100", "H800": "H100"}
# Others are taken for relatives of the one or the other, by their dense half-precision peak.
_NEWER_PEAK = 500e12


class Coefficients(NamedTuple):
    """Shares of what a data sheet promises, and the floors below which nothing gets."""

    # Of the dense peak: large matmuls; those of a pass that would take `matmul_half_s` at the
    # peak reach half of it.
    matmul_efficiency: float
    matmul_half_s: float
    attention_efficiency: float
    # Bytes really moved per byte that element-wise operations read and write.
    elementwise_factor: float
    launch_s: float
    # Of the link inside a node, and of the network between nodes.
    link_efficiency: float
    network_efficiency: float
    hop_latency_s: float
    network_latency_s: float
    contention: float
    # Passes over parameters, gradients and states in an optimizer step.
    optimizer_factor: float
    # Of a step, whatever it does.
    overhead_s: float = 0.0
    # Of the host around every collective of a unit, where hooks wait for it.
    hook_s: float = 0.0
    # How much more an all-reduce gets out of the link inside a node than an all-gather does.
    reduce_speedup: float = 1.0
    # Of the network between nodes: what the tree of an all-reduce gets on two nodes, and the power
    # of the nodes with which that falls.
    tree_efficiency: float = 1.0
    tree_falloff: float = 0.0
    # Bytes of element-wise operations that are left where blocks are compiled.
    compiled_elementwise: float = 1.0
    # Of collectives inside blocks, which find all ranks ready: of the link inside a node, and of
    # each call. An efficiency of 0 stands for what other collectives have.
    exchange_efficiency: float = 0.0
    exchange_latency_s: float = 0.0
    # Efficiency of attention on long sequences, relative to that on those of runs.
    long_attention: float = 1.0

    @property
    def without_latency(self) -> Coefficients:
        """The same if messages took no longer than their bytes."""
        return self._replace(hop_latency_s=0.0, network_latency_s=0.0)


class Bandwidths(NamedTuple):
    """Measured bus bandwidth of collectives of whole nodes, in bytes per second, by nodes."""

    nodes: tuple[float, ...]
    ring: tuple[float, ...]
    all_reduce: tuple[float, ...]


class Hardware(NamedTuple):
    """What a price needs to know of a cluster; rates in bytes or FLOP per second.

    Links may be a column of several networks: then one pass prices all configurations on each.
    """

    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float | Floats
    # Per device, one way; what the link gives where nothing is known.
    network_bandwidth: float | Floats
    devices_per_node: int
    # Groups of more nodes than this share slower links.
    pod_nodes: int = 2**30
    oversubscription: float = 1.0
    # Between a device and its host, and the host memory's share of a device: offload.
    host_link: float = 20e9
    host_memory: float = 15e9
    # Collectives of CPUs: hooks wait for them, and a reduce-scatter is run as an all-reduce.
    on_cpu: bool = False
    # Where the cluster's own collectives were measured, they hold instead of coefficients.
    measured: Bandwidths | None = None

    @property
    def networks(self) -> tuple[int, ...]:
        """The shape of what differs by network: nothing, or their number."""
        return np.broadcast(self.link_bandwidth, self.network_bandwidth).shape[:-1]


def fitted_family(device: DeviceSpec) -> str | None:
    """The family whose measured runs a device's coefficients come from, if there is one."""
    return _FAMILIES.get(device.name.partition("-")[0].upper())


def is_fitted(cluster: ClusterSpec) -> bool:
    """Whether its step times follow from runs on such devices, or on itself."""
    device = cluster.device
    own = cluster.calibration is not None or device_coefficients(device.name) is not None
    return own or fitted_family(device) is not None


def coefficients_for(cluster: ClusterSpec) -> Coefficients | None:
    """What was calibrated, else those of the device, its family or the nearest; None for a CPU."""
    if cluster.calibration is not None:
        return Coefficients(**cluster.calibration.coefficients())
    device = cluster.device
    if device.is_cpu:
        return None
    own = device_coefficients(device.name)
    return family_coefficients(device) if own is None else Coefficients(**own)


def family_coefficients(device: DeviceSpec) -> Coefficients:
    """Those of the device's family or the nearest, fitted to published runs."""
    peak = device.peak_flops("bf16") or device.peak_flops("fp16") or 0.0
    nearest = "H100" if peak >= _NEWER_PEAK else "A100"
    fitted = Coefficients(**step_coefficients(fitted_family(device) or nearest))
    # Published runs used optimizers of many small kernels; the engine's are fused.
    return fitted._replace(optimizer_factor=figure("fused_optimizer"))


def error_interval(cluster: ClusterSpec, *, compiled: bool = False) -> tuple[float, float]:
    """How far predicted tokens/s lie off the measured ones, in nine of ten runs.

    The further from what was fitted, the wider: more nodes, another device, compiled blocks.
    """
    if cluster.calibration is not None:
        return cluster.calibration.interval
    ends = coefficient("step-interval" if is_fitted(cluster) else "step-interval-other")
    wider = interval_growth(cluster.nodes, compiled=compiled)
    # Math libraries differ in the last bit of a power; no end is known to so many digits.
    low, high = (round((1.0 + end) ** wider - 1.0, 9) for end in ends)
    return low, high


def comparison_error() -> float:
    """How far the predicted ratio of two configurations lies off the measured one.

    Of one model on one machine, in four of five measured pairs: errors of the machine and its
    software are the same for both. Smaller differences of speed are too close to call.
    """
    return figure("step-comparison")


def interval_growth(nodes: int, *, compiled: bool = False) -> float:
    """How many times as wide an interval is, on a logarithmic scale, as where runs were fitted."""
    doublings = max(0.0, math.log2(max(1, nodes) / figure("interval_nodes")))
    grown = 1.0 + figure("interval_per_doubling") * doublings
    return grown * (figure("interval_compiled") if compiled else 1.0)


def hardware_of(cluster: ClusterSpec, dtype: DType) -> Hardware | None:
    """The rates a price needs; None where the cluster does not tell them."""
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
        on_cpu=cluster.device.is_cpu,
    )
