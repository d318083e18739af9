"""Settings of a strategy that contradict each other, one text for each contradiction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.spec.strategy import Strategy


def problems_of_low_bits(strategy: Strategy) -> list[str]:
    """Inconsistent settings of low-bit matrix products, one text each."""
    problems = []
    if strategy.linear_dtype is not None and strategy.param_dtype != "bf16":
        problems.append(f"linear_dtype '{strategy.linear_dtype}' needs param_dtype 'bf16'")
    if strategy.low_bit_gather and (strategy.linear_dtype != "fp8" or not strategy.sharded):
        problems.append("low_bit_gather needs linear_dtype 'fp8' and zero1, zero2 or zero3")
    return problems


def problems_of_states(strategy: Strategy) -> list[str]:
    """Inconsistent settings of states and offload, one text each."""
    problems = []
    if strategy.states is not None and strategy.tensor > 1:
        problems.append("states 'bf16+stochastic' does not run with tensor parallelism")
    inner = strategy.tensor > 1 or strategy.context > 1
    if inner and (strategy.offloads("optimizer") or strategy.offloads("activations")):
        problems.append(
            "with tensor or context parallelism only parameters can be offloaded; set offload "
            "to true or false"
        )
    if strategy.states is not None and strategy.offloads("optimizer"):
        problems.append(
            "an offloaded optimizer needs no stochastic rounding: the host has room for states "
            "in fp32"
        )
    if not strategy.offloads("activations"):
        return problems
    if strategy.recompute == "selective":
        problems.append("offload of activations needs recompute none, full or a share")
    if strategy.autocast and strategy.recompute != "full":
        problems.append(
            "offload of activations under autocast, which saves copies of weights, needs "
            "recompute full; or choose zero3, or states bf16"
        )
    if strategy.compile:
        problems.append("offload of activations does not run with compile; leave one out")
    return problems


def problems_of_inner_axes(strategy: Strategy) -> list[str]:
    """Inconsistent settings of tensor and context parallelism, one text each."""
    problems = []
    if strategy.tensor > 1 and strategy.kind == "single":
        problems.append("kind 'single' uses one device; for tensor parallelism choose zero3")
    if strategy.context > 1 and not strategy.sharded:
        problems.append("context parallelism needs sharding; choose zero1, zero2 or zero3")
    if strategy.tensor > 1 and strategy.loss != "plain":
        problems.append(
            "with tensor parallelism the loss is divided by vocabulary; leave loss 'plain'"
        )
    if strategy.context > 1 and strategy.attention == "eager":
        problems.append("context parallelism needs fused attention; leave attention out")
    if strategy.tensor_across_nodes and strategy.tensor == 1:
        problems.append("tensor_across_nodes means nothing without tensor parallelism")
    return problems


def problems_of_experts(strategy: Strategy) -> list[str]:
    """Inconsistent settings of expert parallelism, one text each."""
    if strategy.expert == 1:
        return []
    problems = []
    if not strategy.sharded:
        problems.append("expert parallelism needs sharding; choose zero1, zero2 or zero3")
    if strategy.shard is not None and strategy.mesh.states % strategy.expert:
        problems.append(
            f"expert {strategy.expert} must divide the {strategy.mesh.states} devices that share "
            "one copy of the model states (shard x context)"
        )
    if strategy.tensor > 1:
        problems.append("expert parallelism does not run with tensor parallelism; leave one out")
    if type(strategy.reshard_after_forward) is int:
        problems.append(
            "with expert parallelism reshard_after_forward must be true or false, not a group size"
        )
    if strategy.offload is not False:
        problems.append("expert parallelism does not run with offload; leave one out")
    return problems
