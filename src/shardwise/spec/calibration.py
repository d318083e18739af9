"""Measured coefficients of the step time of a cluster, beyond its data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from shardwise.spec.record import Record

Share = Annotated[float, Field(gt=0, le=10)]
Seconds = Annotated[float, Field(ge=0, le=10)]
Factor = Annotated[float, Field(ge=0, le=1000)]

# Names of older files: the bytes of element-wise operations left where blocks are compiled, and
# attention on long sequences relative to that of runs.
_OLDER = frozenset({"compiled_elementwise", "long_attention"})
# Of a Llama block in 16 bits, where all neighbours share a kernel.
_LEFT_WHERE_FUSED = 0.4


class Calibration(Record):
    """Shares of the device's and links' rates, and floors below which nothing gets.

    `interval` is the relative error of tokens/s that nine of ten predictions stay within.
    """

    matmul_efficiency: Share
    # Matrix products that would take this long at the peak reach half of that efficiency.
    matmul_half_s: Seconds
    attention_efficiency: Share
    # Bytes really moved per byte that element-wise operations read and write.
    elementwise_factor: Factor
    launch_s: Seconds
    # Of the link inside a node, and of the network between nodes.
    link_efficiency: Share
    network_efficiency: Share
    hop_latency_s: Seconds
    network_latency_s: Seconds
    # Seconds lost per second of compute that runs beside a collective.
    contention: Factor
    # Passes over parameters, gradients and states in an optimizer step.
    optimizer_factor: Factor
    # Of a step, whatever it does: Python, the loss, what ranks agree on.
    overhead_s: Seconds = 0.0
    # Of the host around every collective of a unit, on CPUs.
    hook_s: Seconds = 0.0
    # How much more an all-reduce gets out of the link inside a node than an all-gather does.
    reduce_speedup: Share = 1.0
    # Of the network: what the tree of an all-reduce gets on two nodes, and how it falls with nodes.
    tree_efficiency: Share = 1.0
    tree_falloff: Factor = 0.0
    # Where blocks are compiled: how far that goes from single element-wise operations to all
    # neighbours in one kernel, 0 to 1.
    fused: Annotated[float, Field(ge=0, le=1)] = 0.0
    # Of collectives inside blocks: of the link inside a node, and of each call. An efficiency of 0
    # stands for what other collectives have.
    exchange_efficiency: Factor = 0.0
    exchange_latency_s: Seconds = 0.0
    # Seconds of each matrix product beyond its FLOPs.
    product_s: Seconds = 0.0
    # Attention's forward: keys a query sees at half of the efficiency. Its backward: efficiency
    # and those keys relative to the forward. Heads of 64: efficiency relative to heads of 128.
    attention_half_span: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    attention_backward: Share = 1.0
    attention_backward_span: Share = 1.0
    narrow_heads: Share = 1.0
    # Of products of experts: tokens per expert that take as long again as the products of all, and
    # seconds of sorting and combining per routed token and pass.
    grouped_half_tokens: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    routed_s: Seconds = 0.0
    # Bytes moved per logit beyond what its element-wise operations are counted to, in a step.
    head_bytes: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    # Of the host: per block and pass, and the launches left where blocks are compiled.
    block_host_s: Seconds = 0.0
    compiled_launch: Share = 1.0
    # Seconds of the run's software per second of these forms.
    level: Share = 1.0
    # Seconds of products in fewer bits per second of the same in 16, and the width of their output
    # at which the cast of their inputs takes as long again.
    fp8: Share = 1.0
    fp8_cast_width: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    nvfp4: Share = 1.0
    nvfp4_cast_width: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    interval: tuple[float, float] = (-0.2, 0.25)
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, data: Any) -> Any:
        """Cluster files written before attention and fused operations had forms of their own."""
        if not isinstance(data, Mapping) or data.keys().isdisjoint(_OLDER):
            return data
        found = {name: value for name, value in data.items() if name not in _OLDER}
        left = data.get("compiled_elementwise", 1.0)
        if isinstance(left, int | float) and "fused" not in data:
            found["fused"] = min(1.0, max(0.0, (1.0 - left) / (1.0 - _LEFT_WHERE_FUSED)))
        return found

    def coefficients(self) -> dict[str, float]:
        """The same by name, as predictions take them."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name not in ("interval", "source")
        }
