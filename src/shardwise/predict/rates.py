"""Hardware rates, and the coefficients that turn them into predicted seconds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Floats
from shardwise.spec.catalogue import figure
from shardwise.spec.dtype import LinearDType


class Coefficients(NamedTuple):
    """Achieved shares of data-sheet rates, and fixed times that no operation goes below."""

    # Share of the dense peak that large matmuls reach. A pass whose matmuls would take
    # `matmul_half_s` at the peak reaches half of that share.
    matmul_efficiency: float
    matmul_half_s: float
    attention_efficiency: float
    # Bytes moved per byte that element-wise operations read and write.
    elementwise_factor: float
    launch_s: float
    # Achieved shares of the link inside a node and of the network between nodes.
    link_efficiency: float
    network_efficiency: float
    hop_latency_s: float
    network_latency_s: float
    contention: float
    # Passes over parameters, gradients and states in an optimizer step.
    optimizer_factor: float
    # Fixed seconds of every step.
    overhead_s: float = 0.0
    # Seconds of the host for every collective of a unit, where hooks wait for it.
    hook_s: float = 0.0
    # Bandwidth of an all-reduce on the link inside a node, relative to an all-gather.
    reduce_speedup: float = 1.0
    # All-to-alls relative to all-gathers: bandwidth and latency on the link inside a node, and on
    # the network between nodes.
    all_to_all_speedup: float = 1.0
    all_to_all_latency: float = 1.0
    all_to_all_network_speedup: float = 1.0
    all_to_all_network_latency: float = 1.0
    # An all-reduce's tree: its share of the network between two nodes, and the exponent with which
    # that share falls with the number of nodes.
    tree_efficiency: float = 1.0
    tree_falloff: float = 0.0
    # How far compiled blocks fuse element-wise operations: 0 for none, 1 for all neighbours in one
    # kernel.
    fused: float = 0.0
    # Collectives inside blocks, where all ranks are ready: their share of the link inside a node,
    # and seconds per call. An efficiency of 0 means the same as other collectives.
    exchange_efficiency: float = 0.0
    exchange_latency_s: float = 0.0
    # Seconds of each matrix product beyond its FLOPs.
    product_s: float = 0.0
    # Attention: keys per query at which the forward reaches half of the efficiency; efficiency and
    # that number of keys in the backward, relative to the forward; efficiency with heads of 64,
    # relative to heads of 128.
    attention_half_span: float = 0.0
    attention_backward: float = 1.0
    attention_backward_span: float = 1.0
    narrow_heads: float = 1.0
    # Experts: tokens per expert at which grouped products take twice as long, and seconds of
    # sorting and combining per routed token and pass.
    grouped_half_tokens: float = 0.0
    routed_s: float = 0.0
    # The same where a library such as DeepEP sends the tokens.
    library_routed_s: float = 0.0
    # Bytes moved per logit and step, beyond the counted bytes of its element-wise operations.
    head_bytes: float = 0.0
    # The host: seconds per block and pass, and the share of kernel launches that is left in
    # compiled blocks.
    block_host_s: float = 0.0
    compiled_launch: float = 1.0
    # Factor on all predicted seconds, for the software of the run.
    level: float = 1.0
    # Seconds of low-bit matrix products relative to 16 bits, and the output width at which the cast
    # of their inputs takes as long as the product.
    fp8: float = 1.0
    fp8_cast_width: float = 0.0
    nvfp4: float = 1.0
    nvfp4_cast_width: float = 0.0

    def low_bits(self, dtype: LinearDType) -> tuple[float, float]:
        """Seconds of matrix products in this dtype relative to 16 bits, and their cast width.

        Scales per block are priced like scales per tensor.
        """
        if dtype == "nvfp4":
            return self.nvfp4, self.nvfp4_cast_width
        return self.fp8, self.fp8_cast_width

    @property
    def of_all_to_alls(self) -> Coefficients:
        """These coefficients with the rates and latencies that all-to-alls reach on the links."""
        return self._replace(
            link_efficiency=self.link_efficiency * self.all_to_all_speedup,
            hop_latency_s=self.hop_latency_s * self.all_to_all_latency,
            network_efficiency=self.network_efficiency * self.all_to_all_network_speedup,
            network_latency_s=self.network_latency_s * self.all_to_all_network_latency,
        )

    @property
    def without_latency(self) -> Coefficients:
        """These coefficients with zero network latency: a message takes only its bytes' time."""
        return self._replace(hop_latency_s=0.0, network_latency_s=0.0)


class Bandwidths(NamedTuple):
    """Measured bus bandwidths (bytes/s) of collectives over full nodes, by number of nodes."""

    nodes: tuple[float, ...]
    ring: tuple[float, ...]
    all_reduce: tuple[float, ...]


class Hardware(NamedTuple):
    """Rates of a cluster that predicted times depend on, in bytes or FLOPs per second.

    Link bandwidths may be a column of several networks: then one pass predicts every configuration
    on each of them.
    """

    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float | Floats
    # Per device, one way; the link's bandwidth where the network's is unknown.
    network_bandwidth: float | Floats
    devices_per_node: int
    # Groups that span more nodes than this have their bandwidth divided by `oversubscription`.
    pod_nodes: int = 2**30
    oversubscription: float = 1.0
    # For offload: the link between a device and its host, and a device's share of the host's memory
    # bandwidth.
    host_link: float = 20e9
    host_memory: float = 15e9
    # On CPUs, hooks wait for collectives, and a reduce-scatter is run as an all-reduce.
    on_cpu: bool = False
    # Measured collectives of the cluster; they replace bandwidths and coefficients.
    measured: Bandwidths | None = None

    @property
    def networks(self) -> tuple[int, ...]:
        """The leading shape of results: () for one network, (n,) for a column of n networks."""
        return np.broadcast(self.link_bandwidth, self.network_bandwidth).shape[:-1]

    # Attention kernels that a strategy may name instead of the software's: their own values of the
    # coefficients of attention, by name.
    attention_kernels: Mapping[str, Mapping[str, float]] = MappingProxyType({})


def comparison_error() -> float:
    """Relative error of the predicted speed ratio of two configurations, in four of five pairs.

    Both are of one model on one machine, so that errors of the machine and its software cancel.
    Smaller differences of speed are too close to call.
    """
    return figure("step-comparison")


def with_attention(k: Coefficients, hardware: Hardware, kernel: str | None) -> Coefficients:
    """The coefficients with the named attention kernel; unchanged for None or an unknown."""
    own: Mapping[str, float] = hardware.attention_kernels.get(kernel, {}) if kernel else {}
    return k._replace(**own) if own else k
