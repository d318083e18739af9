"""Measured coefficients of the step time of a cluster, beyond its data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from shardwise.spec.record import Record

Share = Annotated[float, Field(gt=0, le=10)]
Seconds = Annotated[float, Field(ge=0, le=10)]
Factor = Annotated[float, Field(ge=0, le=1000)]

# Keys of older files: the share of element-wise bytes left in compiled blocks, and attention on
# long sequences relative to that of runs.
_OLDER_NAMES = frozenset({"compiled_elementwise", "long_attention"})
# Share of element-wise bytes left in a 16-bit Llama block if all neighbours are fused.
_LEFT_WHERE_FUSED = 0.4


class Calibration(Record):
    """Achieved shares of the rates of device and links, and fixed times.

    `interval` is the relative error of tokens/s that nine of ten predictions stay within.
    """

    matmul_efficiency: Share
    # Matrix products that would take this long at the peak reach half of that efficiency.
    matmul_half_s: Seconds
    attention_efficiency: Share
    # Bytes moved per byte that element-wise operations read and write.
    elementwise_factor: Factor
    launch_s: Seconds
    # Achieved share of the link inside a node, and of the network between nodes.
    link_efficiency: Share
    network_efficiency: Share
    hop_latency_s: Seconds
    network_latency_s: Seconds
    # Seconds lost per second of compute that overlaps a collective.
    contention: Factor
    # Passes over parameters, gradients and states in an optimizer step.
    optimizer_factor: Factor
    # Fixed seconds of every step: Python, the loss, agreement between ranks.
    overhead_s: Seconds = 0.0
    # Seconds of the host for every collective of a unit, on CPUs.
    hook_s: Seconds = 0.0
    # Bandwidth of an all-reduce on the link inside a node, relative to an all-gather.
    reduce_speedup: Share = 1.0
    # Bandwidth of an all-to-all on the link inside a node, relative to an all-gather.
    all_to_all_speedup: Share = 1.0
    # Latency of an all-to-all inside a node, relative to an all-gather.
    all_to_all_latency: Factor = 1.0
    # Bandwidth of an all-to-all on the network between nodes, relative to an all-gather.
    all_to_all_network_speedup: Share = 1.0
    # Latency of an all-to-all between nodes, relative to an all-gather.
    all_to_all_network_latency: Factor = 1.0
    # An all-reduce's tree: its share of the network between two nodes, and the exponent with which
    # that share falls with the number of nodes.
    tree_efficiency: Share = 1.0
    tree_falloff: Factor = 0.0
    # How far compiled blocks fuse element-wise operations: 0 for none, 1 for all neighbours in one
    # kernel.
    fused: Annotated[float, Field(ge=0, le=1)] = 0.0
    # Collectives inside blocks: their share of the link inside a node, and seconds per call. An
    # efficiency of 0 means the same as other collectives.
    exchange_efficiency: Factor = 0.0
    exchange_latency_s: Seconds = 0.0
    # Seconds of each matrix product beyond its FLOPs.
    product_s: Seconds = 0.0
    # Keys per query at which attention's forward reaches half of its efficiency.
    attention_half_span: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    # Efficiency and half span of attention's backward, relative to the forward.
    attention_backward: Share = 1.0
    attention_backward_span: Share = 1.0
    # Efficiency with heads of 64, relative to heads of 128.
    narrow_heads: Share = 1.0
    # Tokens per expert at which grouped products of experts take twice as long.
    grouped_half_tokens: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    # Seconds of sorting and combining per routed token and pass.
    routed_s: Seconds = 0.0
    # The same where a library sends tokens to their experts.
    library_routed_s: Seconds = 0.0
    # Bytes moved per logit and step, beyond the counted bytes of its element-wise operations.
    head_bytes: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    # Seconds of the host per block and pass.
    block_host_s: Seconds = 0.0
    # Share of kernel launches that is left in compiled blocks.
    compiled_launch: Share = 1.0
    # Factor on all predicted seconds, for the software of the run.
    level: Share = 1.0
    # Seconds of fp8 matrix products relative to 16 bits.
    fp8: Share = 1.0
    # Output width at which the cast of the inputs takes as long as the product.
    fp8_cast_width: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    # The same two for nvfp4.
    nvfp4: Share = 1.0
    nvfp4_cast_width: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    interval: tuple[float, float] = (-0.2, 0.25)
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, data: Any) -> Any:
        """Drop keys of older cluster files, and convert `compiled_elementwise` to `fused`."""
        if not isinstance(data, Mapping) or data.keys().isdisjoint(_OLDER_NAMES):
            return data
        found = {name: value for name, value in data.items() if name not in _OLDER_NAMES}
        left = data.get("compiled_elementwise", 1.0)
        if isinstance(left, int | float) and "fused" not in data:
            found["fused"] = min(1.0, max(0.0, (1.0 - left) / (1.0 - _LEFT_WHERE_FUSED)))
        return found

    def coefficients(self) -> dict[str, float]:
        """All coefficients by name, without `interval` and `source`."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name not in ("interval", "source")
        }
