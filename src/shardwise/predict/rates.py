"""Rates and coefficients that prices are made of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Floats
from shardwise.spec.catalogue import figure
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import DType, LinearDType


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
    # Where blocks are compiled: how far that goes from single element-wise operations to all
    # neighbours in one kernel, 0 to 1.
    fused: float = 0.0
    # Of collectives inside blocks, which find all ranks ready: of the link inside a node, and of
    # each call. An efficiency of 0 stands for what other collectives have.
    exchange_efficiency: float = 0.0
    exchange_latency_s: float = 0.0
    # Seconds of each matrix product beyond its FLOPs.
    product_s: float = 0.0
    # Attention's forward: keys a query sees at half of the efficiency. Its backward: efficiency
    # and those keys relative to the forward. Heads of 64: efficiency relative to heads of 128.
    attention_half_span: float = 0.0
    attention_backward: float = 1.0
    attention_backward_span: float = 1.0
    narrow_heads: float = 1.0
    # Of products of experts: tokens per expert that take as long again as the products of all, and
    # seconds of sorting and combining per routed token and pass.
    grouped_half_tokens: float = 0.0
    routed_s: float = 0.0
    # Bytes moved per logit beyond what its element-wise operations are counted to, in a step.
    head_bytes: float = 0.0
    # Of the host: per block and pass, and the launches left where blocks are compiled.
    block_host_s: float = 0.0
    compiled_launch: float = 1.0
    # Seconds of the run's software per second of these forms.
    level: float = 1.0
    # Seconds of products in fewer bits per second of the same in 16, and the width of their output
    # at which the cast of their inputs takes as long again.
    fp8: float = 1.0
    fp8_cast_width: float = 0.0
    nvfp4: float = 1.0
    nvfp4_cast_width: float = 0.0

    def low_bits(self, dtype: LinearDType) -> tuple[float, float]:
        """Seconds relative to products in 16 bits, and the cast width. Scales per block cost what
        scales per tensor do."""
        if dtype == "nvfp4":
            return self.nvfp4, self.nvfp4_cast_width
        return self.fp8, self.fp8_cast_width

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


def comparison_error() -> float:
    """How far the predicted ratio of two configurations lies off the measured one.

    Of one model on one machine, in four of five measured pairs: errors of the machine and its
    software are the same for both. Smaller differences of speed are too close to call.
    """
    return figure("step-comparison")


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
