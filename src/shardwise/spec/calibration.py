"""Measured coefficients of the step time of a cluster, beyond its data sheet."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardwise.spec.record import Record

Share = Annotated[float, Field(gt=0, le=10)]
Seconds = Annotated[float, Field(ge=0, le=10)]
Factor = Annotated[float, Field(ge=0, le=1000)]


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
    # Bytes of element-wise operations that are left where blocks are compiled.
    compiled_elementwise: Share = 1.0
    # Of collectives inside blocks: of the link inside a node, and of each call. An efficiency of 0
    # stands for what other collectives have.
    exchange_efficiency: Factor = 0.0
    exchange_latency_s: Seconds = 0.0
    # Efficiency of attention on long sequences, relative to that on those of runs.
    long_attention: Share = 1.0
    interval: tuple[float, float] = (-0.2, 0.25)
    source: str = ""

    def coefficients(self) -> dict[str, float]:
        """The same by name, as predictions take them."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name not in ("interval", "source")
        }
